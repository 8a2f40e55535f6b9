/* SPDX-License-Identifier: MIT */
/* plot.c: hands records to gnuplot: GFLOP/s over tokens attended, a line for each series. */
#include "bench/bench.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static bool have_gnuplot(void)
{
    const char *path = getenv("PATH");
    char copy[8192], file[8300];
    if (path == NULL || strlen(path) >= sizeof copy) {
        return false;
    }
    strcpy(copy, path);
    for (char *rest = copy, *dir; (dir = strsep(&rest, ":")) != NULL;) {
        snprintf(file, sizeof file, "%s/gnuplot", dir);
        if (access(file, X_OK) == 0) {
            return true;
        }
    }
    return false;
}

static double number(const cJSON *object, const char *name)
{
    double x = cJSON_GetNumberValue(cJSON_GetObjectItem(object, name));
    return x == x ? x : 0;
}

static const char *word(const cJSON *object, const char *name)
{
    const char *text = cJSON_GetStringValue(cJSON_GetObjectItem(object, name));
    return text ? text : "";
}

static void series_name(const cJSON *record, char *text, size_t size)
{
    const cJSON *shape = cJSON_GetObjectItem(record, "shape");
    snprintf(text, size, "%s %s, h %d, s_q %d, %d threads", word(record, "operation"), word(record, "format"),
             (int)number(shape, "h_q"), (int)number(shape, "s_q"), (int)number(record, "threads"));
    for (char *c = text; *c; c++) {
        *c = *c == '_' ? '-' : *c; /* gnuplot reads _ as a subscript */
    }
}

/* Tokens that a query token attends, for the horizontal axis. */
static double tokens_of(const cJSON *record)
{
    const cJSON *shape = cJSON_GetObjectItem(record, "shape");
    double topk = number(shape, "topk") + number(shape, "e_topk");
    return topk > 0 ? topk : number(shape, "s_kv");
}

static int draw(FILE *f, const char *path, const cJSON *records)
{
    const cJSON *a, *b;
    int series = 0;
    cJSON_ArrayForEach(a, records)
    {
        char name[160], other[160];
        bool first = true;
        series_name(a, name, sizeof name);
        for (b = records->child; b != a; b = b->next) {
            series_name(b, other, sizeof other);
            first = first && strcmp(name, other) != 0;
        }
        if (!first || number(a, "tflops") <= 0) {
            continue;
        }
        fprintf(f, "$s%d << END\n", series);
        for (b = a; b != NULL; b = b->next) {
            series_name(b, other, sizeof other);
            if (strcmp(name, other) == 0) {
                fprintf(f, "%.9g %.9g\n", tokens_of(b), 1e3 * number(b, "tflops"));
            }
        }
        fprintf(f, "END\nname%d = \"%s\"\n", series, name);
        series++;
    }
    if (series == 0) {
        return cli_error("--plot: no record with FLOP to draw");
    }
    fprintf(f,
            "set terminal svg size 1000,640 background rgb 'white'\nset output '%s'\nset logscale x 2\nset grid\n"
            "set xlabel 'tokens attended by a query token'\nset ylabel 'GFLOP/s'\nset yrange [0:*]\n"
            "set key outside right\nplot ",
            path);
    for (int i = 0; i < series; i++) {
        fprintf(f, "%s$s%d using 1:2 with linespoints title name%d", i ? ", " : "", i, i);
    }
    fprintf(f, "\n");
    return CLI_OK;
}

int bench_plot(const char *path, const cJSON *records)
{
    if (!have_gnuplot()) {
        return cli_error("--plot: gnuplot is not installed; the records are in --json");
    }
    if (strchr(path, '\'') != NULL) {
        return cli_error("--plot: the file's name may not contain a quote");
    }
    FILE *f = popen("gnuplot", "w");
    if (f == NULL) {
        return cli_error("--plot: gnuplot could not be started");
    }
    int status = draw(f, path, records);
    if (pclose(f) != 0 && status == CLI_OK) {
        status = cli_error("--plot: gnuplot failed");
    }
    return status;
}
