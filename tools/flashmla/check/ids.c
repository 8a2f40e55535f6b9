/* SPDX-License-Identifier: MIT */
/* ids.c: `flashmla check --ids`: the list of named faults, which of them to run, and how it went. */
#include "check/ids.h"

#include <string.h>

typedef struct fault {
    const char *id;
    verdict (*run)(checker *k);
    bool quick;
    const char *right;
} fault;

static const fault faults[] = {
#define FAULT(id, run, quick, right) {#id, run, quick, right},
#include "check/ids.def"
#undef FAULT
};

#define FAULT_COUNT (sizeof faults / sizeof faults[0])
#define IDS_BUDGET  4e6 /* multiplications of one reference */

static bool chosen(const fault *f, const char *selection)
{
    if (strcmp(selection, "all") == 0) {
        return true;
    }
    if (strcmp(selection, "quick") == 0) {
        return f->quick;
    }
    const char *at = strstr(selection, f->id);
    return at != NULL && (at[4] == 0 || at[4] == ',');
}

int ids_valid(const char *selection)
{
    size_t length = strlen(selection);
    if (strcmp(selection, "all") == 0 || strcmp(selection, "quick") == 0) {
        return CLI_OK;
    }
    for (size_t at = 0; at <= length; at += 5) {
        bool known = false;
        for (size_t i = 0; i < FAULT_COUNT; i++) {
            known = known ||
                    (strncmp(selection + at, faults[i].id, 4) == 0 && chosen(&faults[i], selection + at));
        }
        if (!known) {
            return cli_error("--ids: no check '%s'; allowed: all, quick, or numbers as in C001,C003",
                             selection + at);
        }
    }
    return CLI_OK;
}

void ids_print(const char *selection)
{
    for (size_t i = 0; i < FAULT_COUNT; i++) {
        if (chosen(&faults[i], selection)) {
            printf("%s %s\n", faults[i].id, faults[i].right);
        }
    }
}

static void record(cJSON *records, const fault *f, const char *set, verdict v, const char *why, double seconds)
{
    cJSON *one = cJSON_CreateObject();
    cJSON_AddStringToObject(one, "id", f->id);
    if (set[0] != 0) {
        cJSON_AddStringToObject(one, "set", set);
    }
    cJSON_AddStringToObject(one, "verdict", verdict_name(v));
    if (v == VERDICT_FAILED) {
        cJSON_AddStringToObject(one, "why", why);
    }
    cJSON_AddNumberToObject(one, "seconds", seconds);
    cJSON_AddItemToArray(records, one);
}

void ids_run(checker *k, const char *selection, const char *replay, const char *set, cJSON *records, ids_tally *tally)
{
    double budget = k->budget;
    k->budget = IDS_BUDGET;
    for (size_t i = 0; i < FAULT_COUNT; i++) {
        const fault *f = &faults[i];
        if (!chosen(f, selection)) {
            continue;
        }
        cli_progress("%s %s", f->id, f->right);
        double start = check_now();
        k->why[0] = 0;
        verdict v = f->run(k);
        double seconds = check_now() - start;
        tally->seconds += seconds;
        tally->passed += v == VERDICT_PASSED;
        tally->not_offered += v == VERDICT_NOT_OFFERED;
        if (v == VERDICT_FAILED || v == VERDICT_BROKEN) {
            tally->failed++;
            cli_progress(NULL);
            printf("FAILED %s: %s\n       %s\n       flashmla check%s --ids=%s\n", f->id, f->right,
                   v == VERDICT_FAILED ? k->why : "no reference", replay, f->id);
            fflush(stdout);
        }
        if (records != NULL) {
            record(records, f, set, v, k->why, seconds);
        }
    }
    cli_progress(NULL);
    k->budget = budget;
}
