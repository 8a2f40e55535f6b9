# SPDX-License-Identifier: MIT
# What `cmake --install` lays down: library, headers, program, pkg-config file, CMake package.
include(CMakePackageConfigHelpers)

install(TARGETS flashmla EXPORT flashmla-targets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY include/flashmla DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
if(TARGET flashmla_program)
  install(TARGETS flashmla_program RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
  install(DIRECTORY bench/shapes DESTINATION ${CMAKE_INSTALL_DATADIR}/flashmla)
endif()
if(TARGET flashmla_cuda)
  install(TARGETS flashmla_cuda LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
endif()

file(RELATIVE_PATH FLASHMLA_PC_TO_PREFIX /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
configure_file(cmake/flashmla.pc.in flashmla.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/flashmla.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

install(EXPORT flashmla-targets NAMESPACE flashmla:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/flashmla)
file(WRITE ${CMAKE_CURRENT_BINARY_DIR}/flashmla-config.cmake
     "include(\"\${CMAKE_CURRENT_LIST_DIR}/flashmla-targets.cmake\")\n")
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/flashmla-config-version.cmake COMPATIBILITY SameMajorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/flashmla-config.cmake ${CMAKE_CURRENT_BINARY_DIR}/flashmla-config-version.cmake
        DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/flashmla)
