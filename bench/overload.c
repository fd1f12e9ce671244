/* Sends one HTTP request again and again, at a fixed rate whatever comes back, and times each answer.
 *
 *     overload ADDRESS PORT REQUEST_FILE RATE SECONDS CONNECTIONS
 *
 * RATE is requests a second, each due at its time (open loop): its latency counts from then on, so a client that falls
 * behind does not hide it. RATE 0: each connection sends the next request when it has its answer (closed loop). The file
 * holds a whole request with `Connection: keep-alive`. Prints one JSON object; latencies are of answers with status 200
 * and of refusals (429 and 503), in microseconds. One thread, epoll; nothing is allocated once it runs.
 *
 * An answer must have a Content-Length and fit into ANSWER_BYTES. A request that finds no free connection is counted as
 * `unsent`. Exit code 1: wrong arguments, or nobody listens. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define ANSWER_BYTES 65536
#define MAX_CONNECTIONS 8192
#define MAX_SAMPLES (1 << 22)
#define REQUEST_BYTES 65536
#define DRAIN_NS 5000000000 /* for answers under way when the time is up */

typedef enum { CLOSED, FREE, BUSY } state;

typedef struct {
    int socket;
    state state;
    int64_t due; /* ns: when its request was to be sent */
    size_t received;
    char answer[ANSWER_BYTES];
} connection;

typedef struct {
    uint32_t *us;
    size_t count;
} samples;

typedef struct {
    struct sockaddr_in address;
    char request[REQUEST_BYTES];
    size_t request_bytes;
    int epoll;
    int connections;
    connection *all;
    int *free; /* numbers of FREE connections, a stack */
    int free_count;
    samples ok, refused;
    uint64_t sent, unsent, other, failed, without_retry_after;
    int64_t ok_in_time; /* answers with 200 before the time was up */
    int64_t end;
} client;

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void add(samples *to, int64_t ns) {
    if (to->count < MAX_SAMPLES) to->us[to->count++] = (uint32_t)(ns / 1000);
}

static int by_size(const void *left, const void *right) {
    uint32_t a = *(const uint32_t *)left, b = *(const uint32_t *)right;
    return (a > b) - (a < b);
}

static uint32_t quantile(const samples *from, double share) {
    if (from->count == 0) return 0;
    return from->us[(size_t)(share * (double)(from->count - 1))];
}

/* Opens connection `number`; false iff nobody listens. */
static bool open_connection(client *c, int number) {
    connection *one = &c->all[number];
    one->socket = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (one->socket < 0) return false;
    if (connect(one->socket, (struct sockaddr *)&c->address, sizeof c->address) != 0) {
        close(one->socket);
        return false;
    }
    int on = 1;
    setsockopt(one->socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    fcntl(one->socket, F_SETFL, O_NONBLOCK);
    struct epoll_event event = {.events = EPOLLIN, .data.u32 = (uint32_t)number};
    epoll_ctl(c->epoll, EPOLL_CTL_ADD, one->socket, &event);
    one->state = FREE;
    c->free[c->free_count++] = number;
    return true;
}

/* The connection broke, or the server ended it: a new one takes its place. */
static void renew(client *c, int number) {
    connection *one = &c->all[number];
    if (one->state == BUSY) c->failed++;
    close(one->socket);
    one->state = CLOSED;
    if (!open_connection(c, number)) c->failed++;
}

static void send_request(client *c, int64_t due) {
    if (c->free_count == 0) {
        c->unsent++;
        return;
    }
    int number = c->free[--c->free_count];
    connection *one = &c->all[number];
    one->state = BUSY;
    one->due = due;
    one->received = 0;
    c->sent++;
    ssize_t written = send(one->socket, c->request, c->request_bytes, MSG_NOSIGNAL);
    if (written != (ssize_t)c->request_bytes) renew(c, number); /* an idle connection takes a small request at once */
}

/* The whole answer's length, 0 while its head is not complete. */
static size_t answer_length(const connection *one) {
    const char *end = memmem(one->answer, one->received, "\r\n\r\n", 4);
    if (end == NULL) return 0;
    const char *field = strcasestr(one->answer, "\r\nContent-Length:");
    size_t body = field == NULL || field > end ? 0 : strtoul(field + 17, NULL, 10);
    return (size_t)(end - one->answer) + 4 + body;
}

static void on_answer(client *c, int number) {
    connection *one = &c->all[number];
    int64_t now = now_ns();
    long status = strtol(one->answer + 9, NULL, 10);
    bool closes = strcasestr(one->answer, "\r\nConnection: close") != NULL;
    if (status == 200) {
        add(&c->ok, now - one->due);
        c->ok_in_time += now <= c->end;
    } else if (status == 429 || status == 503) {
        add(&c->refused, now - one->due);
        c->without_retry_after += strcasestr(one->answer, "\r\nRetry-After:") == NULL;
    } else {
        c->other++;
    }
    one->state = FREE;
    if (closes) {
        renew(c, number);
    } else {
        c->free[c->free_count++] = number;
    }
}

/* Reads what is there. True iff an answer is complete. */
static bool on_readable(client *c, int number) {
    connection *one = &c->all[number];
    size_t room = ANSWER_BYTES - 1 - one->received;
    ssize_t got = recv(one->socket, one->answer + one->received, room, 0);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return false;
    if (got <= 0 || one->state != BUSY) {
        if (one->state == FREE) { /* the server has closed an idle connection: it leaves the stack */
            for (int i = 0; i < c->free_count; i++) {
                if (c->free[i] == number) c->free[i--] = c->free[--c->free_count];
            }
        }
        renew(c, number);
        return false;
    }
    one->received += (size_t)got;
    one->answer[one->received] = '\0';
    size_t length = answer_length(one);
    if (length == 0 || one->received < length) return false;
    on_answer(c, number);
    return true;
}

static void run(client *c, double rate, double seconds) {
    int64_t begin = now_ns();
    c->end = begin + (int64_t)(seconds * 1e9);
    double step = rate > 0 ? 1e9 / rate : 0;
    uint64_t due = 0;
    if (rate <= 0) {
        for (int i = 0; i < c->connections; i++) send_request(c, begin);
    }
    for (;;) {
        int64_t now = now_ns();
        bool over = now >= c->end;
        while (!over && step > 0 && begin + (int64_t)((double)due * step) <= now) {
            send_request(c, begin + (int64_t)((double)due * step));
            due++;
        }
        if (over && (c->free_count == c->connections || now >= c->end + DRAIN_NS)) return;
        struct epoll_event events[256];
        int64_t next = step > 0 && !over ? begin + (int64_t)((double)due * step) - now : 1000000;
        struct timespec wait = {.tv_sec = 0, .tv_nsec = next < 0 ? 0 : next > 999999999 ? 999999999 : next};
        int count = epoll_pwait2(c->epoll, events, 256, &wait, NULL);
        for (int i = 0; i < count; i++) {
            bool answered = on_readable(c, (int)events[i].data.u32);
            if (answered && step <= 0 && now_ns() < c->end) send_request(c, now_ns());
        }
    }
}

static void print_samples(const char *name, samples *from) {
    qsort(from->us, from->count, sizeof *from->us, by_size);
    printf("\"%s\": {\"count\": %zu, \"p50_us\": %u, \"p99_us\": %u, \"max_us\": %u}, ", name, from->count,
           quantile(from, 0.5), quantile(from, 0.99), quantile(from, 1.0));
}

static bool prepare(client *c, char **argv) {
    c->address.sin_family = AF_INET;
    c->address.sin_port = htons((uint16_t)strtoul(argv[2], NULL, 10));
    if (inet_pton(AF_INET, argv[1], &c->address.sin_addr) != 1) return false;
    FILE *file = fopen(argv[3], "rb");
    if (file == NULL) return false;
    c->request_bytes = fread(c->request, 1, sizeof c->request, file);
    fclose(file);
    c->connections = atoi(argv[6]);
    if (c->connections < 1 || c->connections > MAX_CONNECTIONS) return false;
    c->all = calloc((size_t)c->connections, sizeof *c->all);
    c->free = calloc((size_t)c->connections, sizeof *c->free);
    c->ok.us = malloc(MAX_SAMPLES * sizeof(uint32_t));
    c->refused.us = malloc(MAX_SAMPLES * sizeof(uint32_t));
    c->epoll = epoll_create1(EPOLL_CLOEXEC);
    if (c->all == NULL || c->free == NULL || c->ok.us == NULL || c->refused.us == NULL || c->epoll < 0) return false;
    for (int i = 0; i < c->connections; i++) {
        if (!open_connection(c, i)) return false;
    }
    return true;
}

int main(int argc, char **argv) {
    static client c;
    if (argc != 7 || !prepare(&c, argv)) {
        fprintf(stderr, "overload ADDRESS PORT REQUEST_FILE RATE SECONDS CONNECTIONS, and somebody who listens there\n");
        return 1;
    }
    double seconds = atof(argv[5]);
    run(&c, atof(argv[4]), seconds);
    printf("{");
    print_samples("ok", &c.ok);
    print_samples("refused", &c.refused);
    printf("\"sent\": %lu, \"unsent\": %lu, \"other\": %lu, \"failed\": %lu, \"without_retry_after\": %lu, ", c.sent,
           c.unsent, c.other, c.failed, c.without_retry_after);
    printf("\"goodput\": %.2f}\n", (double)c.ok_in_time / seconds);
    return 0;
}
