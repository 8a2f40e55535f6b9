/* SPDX-License-Identifier: MIT */
/*
 * plan_svg.c: a schedule as a picture: one row a worker, width is cost in blocks. A piece is a grey bar for its fixed
 * cost and a bar in its request's colour for its blocks; the title of a bar tells what it is.
 */
#include "file/output_file.h"
#include "plan.h"

#include <stdarg.h>
#include <stdlib.h>

enum { LEFT = 80, TOP = 30, ROW = 18, GAP = 4, WIDTH = 960 };

typedef struct canvas {
    FILE *stream;
    char *text;
    size_t size;
} canvas;

static void row(const plan *p, const canvas *c, int64_t *at, int64_t worker, double unit)
{
    double x = LEFT;
    double y = TOP + (double)worker * (ROW + GAP);

    fprintf(c->stream, "<text x=\"%d\" y=\"%.1f\" text-anchor=\"end\">worker %lld</text>\n", LEFT - 6, y + ROW - 5,
            (long long)worker);
    for (; *at < p->piece_count && p->pieces[*at].worker == worker; (*at)++) {
        const plan_piece *piece = &p->pieces[*at];
        int64_t blocks = piece->end - piece->begin;
        double fixed = (double)p->overhead * unit;
        double width = (double)(blocks > 0 ? blocks : 1) * unit;
        int hue = (int)(piece->request * 137 % 360);
        fprintf(c->stream, "<g><title>request %lld, split %lld, blocks %lld..%lld</title>", (long long)piece->request,
                (long long)piece->split, (long long)piece->begin, (long long)piece->end);
        fprintf(c->stream, "<rect x=\"%.2f\" y=\"%.1f\" width=\"%.2f\" height=\"%d\" fill=\"#ccc\"/>", x, y, fixed,
                ROW);
        fprintf(c->stream,
                "<rect x=\"%.2f\" y=\"%.1f\" width=\"%.2f\" height=\"%d\" fill=\"hsl(%d,60%%,65%%)\" stroke=\"#fff\"/>",
                x + fixed, y, width, ROW, hue);
        if (width > 16) {
            fprintf(c->stream, "<text x=\"%.2f\" y=\"%.1f\" text-anchor=\"middle\">%lld</text>", x + fixed + width / 2,
                    y + ROW - 5, (long long)piece->request);
        }
        fputs("</g>\n", c->stream);
        x += fixed + width;
    }
}

static int64_t longest_row(const plan *p)
{
    int64_t longest = 1;
    int64_t cost = 0;

    for (int64_t i = 0; i < p->piece_count; i++) {
        int64_t blocks = p->pieces[i].end - p->pieces[i].begin;
        cost = i > 0 && p->pieces[i].worker == p->pieces[i - 1].worker ? cost : 0;
        cost += (blocks > 0 ? blocks : 1) + p->overhead;
        longest = cost > longest ? cost : longest;
    }
    return longest;
}

static void draw(const plan *p, const canvas *c)
{
    int64_t longest = longest_row(p);
    int64_t at = 0;

    fprintf(c->stream,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%lld\" font-family=\"sans-serif\" "
            "font-size=\"11\">\n<rect width=\"100%%\" height=\"100%%\" fill=\"#fff\"/>\n",
            LEFT + WIDTH + 20, (long long)(TOP + p->parts * (ROW + GAP) + 10));
    fprintf(c->stream,
            "<text x=\"%d\" y=\"18\">%lld requests on %lld workers; the longest row costs %lld blocks "
            "(grey: %lld of every piece)</text>\n",
            LEFT, (long long)p->batch, (long long)p->parts, (long long)longest, (long long)p->overhead);
    for (int64_t worker = 0; worker < p->parts; worker++) {
        row(p, c, &at, worker, (double)WIDTH / (double)longest);
    }
    fputs("</svg>\n", c->stream);
}

int plan_draw(const plan *p, const char *path)
{
    canvas c = {0};
    output_file file;
    char error[1024];

    c.stream = open_memstream(&c.text, &c.size);
    if (c.stream == NULL) {
        return cli_error("not enough memory");
    }
    draw(p, &c);
    bool failed = ferror(c.stream) != 0;
    failed = fclose(c.stream) != 0 || failed;
    int result = failed ? -1 : output_begin(&file, path, error, sizeof error);
    if (result == 0) {
        result = output_put(&file, c.text, c.size, error, sizeof error);
    }
    if (result == 0) {
        result = output_commit(&file, error, sizeof error);
    }
    free(c.text);
    return result == 0 ? CLI_OK : cli_error("%s", failed ? "not enough memory" : error);
}
