/* SPDX-License-Identifier: MIT */
/* The smallest user of an installed libflashmla: header and library agree on the version. */
#include <stdio.h>

#include <flashmla/flashmla.h>

int main(void)
{
    printf("libflashmla %d, header %d\n", (int)fmla_version(), FMLA_VERSION);
    return fmla_version() == FMLA_VERSION ? 0 : 1;
}
