/* SPDX-License-Identifier: MIT */
/* The only place where the version is written: CMake, the program, the Python module and the docs read it from here. */
#ifndef FLASHMLA_VERSION_H
#define FLASHMLA_VERSION_H

#define FMLA_VERSION_MAJOR 0
#define FMLA_VERSION_MINOR 1
#define FMLA_VERSION_PATCH 0
#define FMLA_VERSION_STRING "0.1.0"

/* One number for comparisons: 10000 * major + 100 * minor + patch. */
#define FMLA_VERSION (10000 * FMLA_VERSION_MAJOR + 100 * FMLA_VERSION_MINOR + FMLA_VERSION_PATCH)

#endif
