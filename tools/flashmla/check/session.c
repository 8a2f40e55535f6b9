/* SPDX-License-Identifier: MIT */
/* session.c: runs cases against the reference and tells how it went. */
#include "check/session.h"
#include "check/ids.h"

#include <stdlib.h>
#include <string.h>

#define FAILURES_MAX 40  /* printed; the rest is counted */
#define PAGES_KEPT   4e9 /* bytes; see jobs.c for several processes */

double budget_of(const check_options *o)
{
    return o->one != NULL ? 200e6 : o->set == CASES_QUICK ? 8e6 : o->set == CASES_ALL ? 40e6 : 20e6;
}

static verdict check_alone(checker *k, const test_case *c)
{
    switch (c->op) {
    case FMLA_OP_MHA_FORWARD:
    case FMLA_OP_MHA_BACKWARD:
        return check_mha(k, c);
    case FMLA_OP_QUANTIZE:
        return check_quantize(k, c);
    case FMLA_OP_DEQUANTIZE:
        return check_dequantize(k, c);
    case FMLA_OP_CONVERT:
        return check_convert(k, c);
    case FMLA_OP_MERGE:
        return check_merge(k, c);
    case FMLA_OP_PERMUTE_Q_B:
    case FMLA_OP_PERMUTE_WV:
        return check_permute(k, c);
    case FMLA_OP_INDICES_CONVERT:
        return check_indices_convert(k, c);
    case FMLA_OP_FP8_CAST:
        return check_fp8_cast(k, c);
    default:
        return check_schedule(k, c);
    }
}

void check_case(checker *k, const test_case *c)
{
    for (int i = 0; i < k->choice_count; i++) {
        k->choices[i].verdict = VERDICT_PASSED;
        k->choices[i].why[0] = 0;
    }
    if (case_is_mqa(c)) {
        check_attention(k, c);
        return;
    }
    for (int i = 0; i < k->choice_count; i++) {
        check_use(k, i);
        check_note(k, check_alone(k, c));
    }
}

typedef struct tally {
    int64_t passed, failed, not_offered;
    double seconds;
    double worst[QUANTITY_COUNT];
} tally;

/* A run of the command: what is asked for, and what came out so far. */
typedef struct session {
    const check_options *o;
    const case_list *list;
    checker *k;    /* NULL in the process that only hands out cases */
    outcome first; /* the device, its tier and threads */
    tally tallies[CHECK_CHOICES][FMLA_OP_COUNT];
    cJSON **records; /* of each case; NULL: no JSON */
    int64_t done, printed, failed;
} session;

/* In each process that runs cases: opens the contexts. */
static int session_begin(void *user, outcome *hello)
{
    session *s = user;
    if (checker_open(&s->k, s->o->choices, s->o->choice_count, budget_of(s->o)) != CLI_OK) {
        return CLI_ERROR;
    }
    const checker *k = s->k;
    hello->device = fmla_context_device(k->engine.context);
    hello->isa = fmla_context_isa(k->engine.context);
    hello->threads = fmla_context_threads(k->engine.context);
    return CLI_OK;
}

static void session_hello(void *user, const outcome *hello)
{
    session *s = user;
    s->first = *hello;
    printf("checking %s, %s, %d threads%s, against the float64 reference\n",
           fmla_device_name((fmla_device)hello->device), fmla_isa_name((fmla_isa)hello->isa), (int)hello->threads,
           s->o->jobs > 1 ? " in each process" : "");
    fflush(stdout);
}

static void session_work(void *user, size_t index, outcome *result)
{
    session *s = user;
    double start = check_now();
    const test_case *c = &s->list->cases[index];
    check_case(s->k, c);
    if (s->o->jobs == 1 && share_memory(c, s->o->choice_count) > PAGES_KEPT) {
        memory_return_pages();
    }
    memset(result, 0, sizeof *result);
    result->index = index;
    result->seconds = check_now() - start;
    for (int i = 0; i < s->k->choice_count; i++) {
        result->verdicts[i] = s->k->choices[i].verdict;
        memcpy(result->worst[i], s->k->choices[i].worst[c->op], sizeof result->worst[i]);
        memcpy(result->why[i], s->k->choices[i].why, sizeof result->why[i]);
    }
}

/* As --sets says it. */
static void choice_name(const cli_options *set, char *name, size_t size)
{
    if (set->profile != 0) {
        snprintf(name, size, "%d", (int)set->profile);
    } else {
        snprintf(name, size, "%s", cli_kernels_name(set));
    }
}

static cJSON *record_of(const session *s, const char *text, const outcome *r)
{
    cJSON *one = cJSON_CreateObject(), *verdicts = one, *why = NULL;
    cJSON_AddStringToObject(one, "case", text);
    if (s->o->choice_count > 1) {
        verdicts = cJSON_AddObjectToObject(one, "verdicts");
    }
    for (int i = 0; i < s->o->choice_count; i++) {
        char name[24] = "verdict";
        if (s->o->choice_count > 1) {
            choice_name(&s->o->choices[i], name, sizeof name);
        }
        cJSON_AddStringToObject(verdicts, name, verdict_name((verdict)r->verdicts[i]));
        if (r->verdicts[i] == VERDICT_FAILED && s->o->choice_count > 1) {
            why = why != NULL ? why : cJSON_AddObjectToObject(one, "why");
            cJSON_AddStringToObject(why, name, r->why[i]);
        } else if (r->verdicts[i] == VERDICT_FAILED) {
            cJSON_AddStringToObject(one, "why", r->why[i]);
        }
    }
    cJSON_AddNumberToObject(one, "seconds", r->seconds);
    return one;
}

static void session_take(void *user, const outcome *r)
{
    session *s = user;
    const test_case *c = &s->list->cases[r->index];
    char text[512], replay[128];
    case_print(c, text, sizeof text);
    s->done++;
    cli_progress("%lld/%zu %s", (long long)s->done, s->list->count, text);
    for (int i = 0; i < s->o->choice_count; i++) {
        tally *t = &s->tallies[i][c->op];
        t->seconds += r->seconds / s->o->choice_count;
        t->passed += r->verdicts[i] == VERDICT_PASSED;
        t->not_offered += r->verdicts[i] == VERDICT_NOT_OFFERED;
        t->failed += verdict_is_bad((verdict)r->verdicts[i]);
        for (int j = 0; j < QUANTITY_COUNT; j++) {
            t->worst[j] = r->worst[i][j] > t->worst[j] ? r->worst[i][j] : t->worst[j];
        }
        if (verdict_is_bad((verdict)r->verdicts[i])) {
            cli_progress(NULL);
            if (s->printed++ < FAILURES_MAX) {
                cli_replay_options(&s->o->choices[i], replay, sizeof replay);
                printf("FAILED %s\n       flashmla check%s --case \"%s\"\n",
                       r->verdicts[i] == VERDICT_FAILED ? r->why[i] : "no reference", replay, text);
                fflush(stdout);
            }
        }
    }
    if (s->records != NULL) {
        s->records[r->index] = record_of(s, text, r);
    }
}

/* One line per operation and choice: how many, how near to the bounds, how long. */
static int64_t print_tallies(session *s)
{
    int64_t passed = 0, not_offered = 0;
    int width = s->o->choice_count > 1 ? 26 : 17;
    printf("%-*s %7s %7s %9s %12s %12s\n", width, "operation", "passed", "failed", "seconds", "out/bound", "lse/bound");
    for (int i = 0; i < FMLA_OP_COUNT * s->o->choice_count; i++) {
        int op = i / s->o->choice_count, which = i % s->o->choice_count;
        const tally *t = &s->tallies[which][op];
        char name[64], set[24] = "";
        if (t->passed + t->failed + t->not_offered == 0) {
            continue;
        }
        if (s->o->choice_count > 1) {
            choice_name(&s->o->choices[which], set, sizeof set);
        }
        snprintf(name, sizeof name, "%s%s%s", fmla_operation_name((fmla_operation)op), set[0] ? " " : "", set);
        printf("%-*s %7lld %7lld %9.1f", width, name, (long long)t->passed, (long long)t->failed, t->seconds);
        if (op <= FMLA_OP_MHA_FORWARD) {
            printf(" %12.3f %12.3f", t->worst[QUANTITY_OUT], t->worst[QUANTITY_LSE]);
        }
        printf("\n");
        passed += t->passed;
        s->failed += t->failed;
        not_offered += t->not_offered;
    }
    if (not_offered > 0) {
        printf("%lld cases are not offered by this backend\n", (long long)not_offered);
    }
    return passed;
}

static int write_json(const session *s, cJSON *ids)
{
    cJSON *root = cJSON_CreateObject();
    cJSON_AddStringToObject(root, "version", FMLA_VERSION_STRING);
    cJSON_AddStringToObject(root, "backend", fmla_device_name((fmla_device)s->first.device));
    if (s->first.device != FMLA_DEVICE_CUDA) {
        cJSON_AddStringToObject(root, "isa", fmla_isa_name((fmla_isa)s->first.isa));
    } else if (s->o->choice_count > 1) {
        cJSON_AddStringToObject(root, "sets", s->o->sets);
    } else {
        cJSON_AddStringToObject(root, "kernels", cli_kernels_name(&s->o->choices[0]));
        cJSON_AddNumberToObject(root, "profile_kib", s->o->choices[0].profile);
    }
    int64_t due = (int64_t)s->list->count - s->o->skip;
    if (s->o->skip > 0) {
        cJSON_AddNumberToObject(root, "cases_skipped", (double)s->o->skip);
    }
    if (s->done < due) {
        cJSON_AddNumberToObject(root, "cases_not_run", (double)due - (double)s->done);
    }
    cJSON *cases = cJSON_AddArrayToObject(root, "cases");
    for (size_t i = 0; i < s->list->count; i++) {
        if (s->records[i] != NULL) {
            cJSON_AddItemToArray(cases, s->records[i]);
        }
    }
    while (cJSON_GetArraySize(ids) > 0) {
        cJSON_AddItemToArray(cases, cJSON_DetachItemFromArray(ids, 0));
    }
    return cli_write_json(s->o->json, root);
}

/* The named faults, with one choice after the other. */
static int64_t run_ids(session *s, cJSON *records)
{
    checker *k = s->k;
    choice *all = k->choices;
    int count = k->choice_count;
    int64_t passed = 0;
    for (int i = 0; i < count; i++) {
        char replay[128], set[24] = "";
        ids_tally t = {0};
        k->choices = &all[i];
        k->choice_count = 1;
        check_use(k, 0);
        cli_replay_options(&s->o->choices[i], replay, sizeof replay);
        if (count > 1) {
            choice_name(&s->o->choices[i], set, sizeof set);
        }
        ids_run(k, s->o->ids, replay, set, records, &t);
        printf("named faults%s%-*s %7lld %7lld %9.1f\n", count > 1 ? " " : "", count > 1 ? 13 : 5, set,
               (long long)t.passed, (long long)t.failed, t.seconds);
        if (t.not_offered > 0) {
            printf("%lld named faults are not offered by this backend\n", (long long)t.not_offered);
        }
        s->failed += t.failed;
        passed += t.passed;
    }
    k->choices = all;
    k->choice_count = count;
    return passed;
}

/* All cases, in this process or in several. CLI_OK, CLI_FAILED if some were left out, or CLI_ERROR. */
static int run_list(session *s)
{
    outcome *result = xcalloc(1, sizeof *result);
    int status = CLI_OK;
    if (s->o->jobs > 1) {
        const jobs_work work = {session_begin, session_work, session_hello, session_take, s};
        status = jobs_run(&work, s->list, s->o->jobs, jobs_memory(s->o->memory), s->o->choice_count, budget_of(s->o),
                          s->o->skip);
    } else {
        status = session_begin(s, result);
        if (status == CLI_OK) {
            session_hello(s, result);
        }
        for (size_t i = 0; i < s->list->count && status == CLI_OK; i++) {
            session_work(s, i, result);
            session_take(s, result);
        }
    }
    free(result);
    cli_progress(NULL);
    return status;
}

int run_checks(const check_options *o, const case_list *list)
{
    session *s = xcalloc(1, sizeof *s);
    cJSON *ids = o->json ? cJSON_CreateArray() : NULL;
    s->o = o;
    s->list = list;
    s->records = o->json ? xcalloc(list->count, sizeof *s->records) : NULL;
    int status = run_list(s);
    if (status != CLI_ERROR) {
        int64_t passed = print_tallies(s);
        if (o->ids != NULL && status == CLI_OK) {
            outcome hello;
            status = s->k != NULL ? CLI_OK : session_begin(s, &hello);
            passed += status == CLI_OK ? run_ids(s, ids) : 0;
        }
        if (o->json != NULL && write_json(s, ids) != CLI_OK) {
            status = CLI_ERROR;
        }
        printf("%lld passed, %lld failed\n", (long long)passed, (long long)s->failed);
        status = s->failed > 0 ? CLI_FAILED : status;
    }
    checker_close(s->k);
    cJSON_Delete(ids);
    free(s->records);
    free(s);
    return status;
}
