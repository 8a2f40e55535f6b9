/* SPDX-License-Identifier: MIT */
/* jobs.c: the process that hands out cases, and the loop of those that run them. */
#include "check/jobs.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define NO_CASE     SIZE_MAX
#define KEPT_ALWAYS 1e9 /* bytes of pages that are not worth giving back */

typedef struct worker {
    pid_t pid; /* 0: none */
    int socket;
    bool begun;
    size_t index; /* of the case that it runs, or NO_CASE */
    double kept;  /* bytes that it holds, or does not give back after a case */
} worker;

typedef struct order {
    size_t index;
    size_t return_pages; /* first; 0 or 1 */
} order;

typedef struct pool {
    const jobs_work *work;
    const case_list *list;
    int choices;
    double limit; /* bytes */
    int running;
    worker *workers;
    int64_t jobs;
    size_t *dearest; /* the dearest case first */
    bool *given;
    size_t first; /* all before dearest[first] have been given */
    size_t done;
    bool begun; /* some process has */
} pool;

static volatile sig_atomic_t stopped;

static void stop(int number)
{
    stopped = number;
}

/* A process that runs cases: it never returns. */
static void serve(const pool *p, int socket)
{
    outcome *result = xcalloc(1, sizeof *result);
    order given;
    signal(SIGTERM, SIG_DFL);
    signal(SIGINT, SIG_DFL);
    for (int64_t i = 0; i < p->jobs; i++) {
        if (p->workers[i].pid != 0) {
            close(p->workers[i].socket);
        }
    }
    if (p->work->begin(p->work->user, result) != CLI_OK) {
        _exit(1);
    }
    do {
        if (send(socket, result, sizeof *result, MSG_NOSIGNAL) != (ssize_t)sizeof *result ||
            recv(socket, &given, sizeof given, 0) != (ssize_t)sizeof given) {
            _exit(0);
        }
        if (given.return_pages) {
            memory_return_pages();
        }
        cli_memory_pool(true, given.return_pages);
        p->work->work(p->work->user, given.index, result);
    } while (true);
}

static void start(pool *p, worker *w)
{
    int ends[2];
    *w = (worker){.index = NO_CASE};
    fflush(NULL);
    if (socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends) != 0) {
        cli_error("--jobs: no socket: %s", strerror(errno));
        return;
    }
    pid_t pid = fork();
    if (pid == 0) {
        close(ends[0]);
        serve(p, ends[1]);
    }
    close(ends[1]);
    if (pid < 0) {
        close(ends[0]);
        cli_error("--jobs: no process: %s", strerror(errno));
        return;
    }
    w->pid = pid;
    w->socket = ends[0];
}

/* Closes the socket, upon which the process ends, and waits for that; how it ended. */
static int finish(worker *w)
{
    int how = 0;
    close(w->socket);
    while (waitpid(w->pid, &how, 0) < 0 && errno == EINTR) {
    }
    w->pid = 0;
    w->kept = 0;
    return how;
}

/* The process is gone. What it ran has failed with it, and another one takes its place. */
static void mourn(pool *p, worker *w)
{
    bool begun = w->begun;
    size_t index = w->index;
    int how = finish(w);
    p->running -= index != NO_CASE;
    if (stopped || !begun) {
        return; /* what it ran was not judged; or it has said why it cannot begin */
    }
    if (index != NO_CASE) {
        outcome *lost = xcalloc(1, sizeof *lost);
        lost->index = index;
        for (int i = 0; i < p->choices; i++) {
            lost->verdicts[i] = VERDICT_FAILED;
            snprintf(lost->why[i], sizeof lost->why[i], "the process that ran it ended with %s %d",
                     WIFSIGNALED(how) ? "signal" : "status", WIFSIGNALED(how) ? WTERMSIG(how) : WEXITSTATUS(how));
        }
        p->work->take(p->work->user, lost);
        p->done++;
        free(lost);
    }
    start(p, w);
}

static void hear(pool *p, worker *w, outcome *said)
{
    ssize_t size = recv(w->socket, said, sizeof *said, 0);
    if (size < 0 && errno == EINTR) {
        return;
    }
    if (size != (ssize_t)sizeof *said) {
        mourn(p, w);
        return;
    }
    if (!w->begun) {
        if (!p->begun) {
            p->work->hello(p->work->user, said);
        }
        w->begun = p->begun = true;
        return;
    }
    p->running--;
    w->index = NO_CASE;
    p->done++;
    p->work->take(p->work->user, said);
    for (int i = 0; i < p->choices; i++) {
        if (verdict_is_bad((verdict)said->verdicts[i])) {
            finish(w);
            start(p, w);
            return;
        }
    }
}

/* The dearest case that there is room for beside what the others hold; one that is too large for it runs alone. The
 * pages of earlier cases are used again, and given back where they are many more than the case needs. */
static bool choose(pool *p, worker *w, order *chosen)
{
    double others = -w->kept;
    for (int64_t i = 0; i < p->jobs; i++) {
        others += p->workers[i].kept;
    }
    while (p->first < p->list->count && p->given[p->first]) {
        p->first++;
    }
    for (size_t i = p->first; i < p->list->count; i++) {
        double bytes = share_memory(&p->list->cases[p->dearest[i]], p->choices);
        bool too_many = w->kept > 2 * bytes + KEPT_ALWAYS;
        double kept = too_many || w->kept < bytes ? bytes : w->kept;
        if (!p->given[i] && (p->running == 0 || others + kept <= p->limit)) {
            p->given[i] = true;
            w->kept = kept;
            *chosen = (order){p->dearest[i], too_many};
            return true;
        }
    }
    return false;
}

/* Gives work to all who wait; lets them go when there is none, not even for later. */
static void hand_out(pool *p)
{
    for (int64_t i = 0; i < p->jobs; i++) {
        worker *w = &p->workers[i];
        order given;
        if (w->pid == 0 || !w->begun || w->index != NO_CASE) {
            continue;
        }
        bool chosen = !stopped && choose(p, w, &given);
        if (!chosen && (stopped || p->first == p->list->count)) {
            finish(w);
        } else if (chosen) {
            w->index = given.index;
            p->running++;
            if (send(w->socket, &given, sizeof given, MSG_NOSIGNAL) != (ssize_t)sizeof given) {
                mourn(p, w);
            }
        }
    }
}

static void serve_all(pool *p)
{
    struct pollfd *polled = xcalloc((size_t)p->jobs, sizeof *polled);
    worker **whose = xcalloc((size_t)p->jobs, sizeof *whose);
    outcome *said = xcalloc(1, sizeof *said);
    for (;;) {
        nfds_t count = 0;
        hand_out(p);
        for (int64_t i = 0; i < p->jobs; i++) {
            if (p->workers[i].pid != 0) {
                whose[count] = &p->workers[i];
                polled[count++] = (struct pollfd){.fd = p->workers[i].socket, .events = POLLIN};
            }
        }
        if (count == 0) {
            break;
        }
        if (poll(polled, count, -1) < 0) {
            continue; /* a signal: see hand_out */
        }
        for (nfds_t i = 0; i < count; i++) {
            if (polled[i].revents != 0) {
                hear(p, whose[i], said);
            }
        }
    }
    free(said);
    free(whose);
    free(polled);
}

double jobs_memory(int64_t gib)
{
    return gib > 0 ? (double)gib * 0x1p30 : 0.75 * (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE);
}

int jobs_run(const jobs_work *work, const case_list *list, int64_t jobs, double limit, int choices, double budget,
             int64_t skip)
{
    jobs = (size_t)jobs < list->count ? jobs : (int64_t)list->count;
    jobs = jobs < 1 ? 1 : jobs;
    pool p = {.work = work, .list = list, .choices = choices, .limit = limit, .jobs = jobs};
    struct sigaction action = {.sa_handler = stop}, old_term, old_int;
    p.workers = xcalloc((size_t)jobs, sizeof *p.workers);
    p.given = xcalloc(list->count, sizeof *p.given);
    p.dearest = share_order(list, budget);
    size_t skipped = (size_t)skip < list->count ? (size_t)skip : list->count;
    for (size_t i = 0; i < skipped; i++) {
        p.given[i] = true;
    }
    stopped = 0;
    sigaction(SIGTERM, &action, &old_term);
    sigaction(SIGINT, &action, &old_int);
    for (int64_t i = 0; i < jobs; i++) {
        start(&p, &p.workers[i]);
    }
    serve_all(&p);
    sigaction(SIGTERM, &old_term, NULL);
    sigaction(SIGINT, &old_int, NULL);
    int status = p.begun ? CLI_OK : CLI_ERROR;
    if (p.begun && p.done + skipped < list->count) {
        cli_error("%zu of %zu cases were not run", list->count - skipped - p.done, list->count - skipped);
        status = CLI_FAILED;
    }
    free(p.dearest);
    free(p.given);
    free(p.workers);
    return status;
}
