/* Sends paced streams through a gateway, checks every byte of them, and prints figures as JSON.
 *
 * usage: client PORT BODY_FILE STREAMS REQUESTS TOKENS STAGGER_MS WARM_MS WINDOW_MS GRACE_MS [PID ...]
 *
 * STREAMS connections begin one after another within STAGGER_MS, and send REQUESTS requests each, for TOKENS events. Each
 * request is BODY_FILE with its own number in place of every "@@@@@@@@" near its beginning. Delays of tokens are those
 * seen in the window, which begins after WARM_MS; CPU time and memory of the processes PID ... are read at its edges.
 * What runs GRACE_MS after it is given up. */
#include "stream.h"

enum { EVENTS = 512, READ_BYTES = 1 << 16, EVENT_ROOM = 4096, MAX_PIDS = 64, MARK = 8, MARKED = 4096 };
static const char LAST_PLAIN[] = LAST_HEAD LAST_TAIL, LAST_LEAKED[] = LAST_HEAD "," HANDLE LAST_TAIL;

typedef enum { HEAD, SIZE, DATA, DATA_END, LENGTH, TRAILER } Part;

typedef struct {
  int fd, left, writable;   /* left: requests */
  char *out;
  size_t out_len, out_at;
  int64_t asked, seen;      /* seen: last token */
  Part part;
  size_t room;              /* bytes left of the chunk, or of the body */
  char head[EVENT_ROOM], event[EVENT_ROOM];
  size_t head_len, event_len;
  uint32_t number;          /* of the next token */
  int last, done;           /* terminal event, [DONE] */
} Stream;

typedef struct { uint32_t *at; size_t len, room; } Series; /* in units of 0.1 us */

static struct { long finished, failed, corrupt, leaked, stripped, tokens, window_tokens; int status; } count;
static Series lag, gap, late, ttft;
static char *body;
static size_t body_len;
static int port, poller, live, requests, tokens, asked_so_far;
static int64_t from, until;
static int pids[MAX_PIDS], pid_count;
static double cpu[2][MAX_PIDS];
static long rss[2][MAX_PIDS];

static void add(Series *series, int64_t ns) {
  if (series->len == series->room) {
    series->room = 2 * series->room + 4096;
    series->at = checked(realloc(series->at, series->room * sizeof *series->at));
  }
  int64_t units = ns < 0 ? 0 : ns / 100;
  series->at[series->len++] = units > UINT32_MAX ? UINT32_MAX : (uint32_t)units;
}

static int ascending(const void *a, const void *b) {
  uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
  return x < y ? -1 : x > y;
}

static void print(const char *name, Series *series) {
  size_t n = series->len;
  printf(",\"%s\":", name);
  if (!n) { printf("null"); return; }
  qsort(series->at, n, sizeof *series->at, ascending);
  const double units = 10.0;
  printf("{\"n\":%zu,\"p50\":%.1f,\"p90\":%.1f,\"p99\":%.1f,\"max\":%.1f}", n, series->at[n / 2] / units,
         series->at[n * 9 / 10] / units, series->at[n * 99 / 100] / units, series->at[n - 1] / units);
}

/* CPU time of a whole process, to the nanosecond; /proc has it in ticks of 10 ms. */
static double cpu_seconds(int pid) {
  clockid_t clock;
  struct timespec t;
  if (clock_getcpuclockid(pid, &clock) || clock_gettime(clock, &t)) return 0;
  return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static long resident_bytes(int pid) {
  char path[64];
  long pages = 0;
  sprintf(path, "/proc/%d/statm", pid);
  FILE *file = fopen(path, "r");
  if (!file) return 0;
  if (fscanf(file, "%*d %ld", &pages) != 1) pages = 0;
  fclose(file);
  return pages * sysconf(_SC_PAGESIZE);
}

static void read_processes(int edge) {
  for (int i = 0; i < pid_count; i++) {
    cpu[edge][i] = cpu_seconds(pids[i]);
    rss[edge][i] = resident_bytes(pids[i]);
  }
}

static void begin(Stream *stream);

static void watch(Stream *stream, int writable) {
  if (stream->writable == writable) return;
  struct epoll_event event = {.events = EPOLLIN | (writable ? EPOLLOUT : 0), .data.ptr = stream};
  epoll_ctl(poller, EPOLL_CTL_MOD, stream->fd, &event);
  stream->writable = writable;
}

static void leave(Stream *stream) {
  close(stream->fd);
  stream->fd = -1;
  live--;
}

static void fail(Stream *stream, int status) {
  count.failed++;
  if (status) count.status = status;
  leave(stream);
}

static void push(Stream *stream) {
  while (stream->out_at < stream->out_len) {
    ssize_t sent = send(stream->fd, stream->out + stream->out_at, stream->out_len - stream->out_at, MSG_NOSIGNAL);
    if (sent < 0) {
      if (errno == EAGAIN) watch(stream, 1);
      return; /* what else it may be, reading tells too */
    }
    stream->out_at += (size_t)sent;
  }
  watch(stream, 0);
}

static void begin(Stream *stream) {
  size_t room = body_len + 256;
  stream->out = checked(realloc(stream->out, room));
  size_t head = (size_t)sprintf(stream->out, "POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\n"
                                "content-type: application/json\r\ncontent-length: %zu\r\n\r\n", body_len);
  memcpy(stream->out + head, body, body_len);
  char number[MARK + 1], *end = stream->out + head + (body_len < MARKED ? body_len : MARKED), *mark = stream->out + head;
  sprintf(number, "%08x", (unsigned)asked_so_far++);
  for (; (mark = memmem(mark, (size_t)(end - mark), "@@@@@@@@", MARK)); mark += MARK) memcpy(mark, number, MARK);
  stream->out_len = head + body_len, stream->out_at = 0;
  stream->part = HEAD;
  stream->head_len = stream->event_len = 0;
  stream->number = 0, stream->last = stream->done = 0;
  stream->asked = now_ns();
  push(stream);
}

static int open_stream(Stream *stream) {
  struct sockaddr_in address = loopback(port);
  stream->fd = socket(AF_INET, SOCK_STREAM, 0);
  if (stream->fd < 0 || connect(stream->fd, (void *)&address, sizeof address)) return perror("connect"), 0;
  prepare_socket(stream->fd);
  struct epoll_event event = {.events = EPOLLIN, .data.ptr = stream};
  epoll_ctl(poller, EPOLL_CTL_ADD, stream->fd, &event);
  return 1;
}

static int is(const Stream *stream, const char *text, size_t len) {
  return stream->event_len == len && memcmp(stream->event, text, len) == 0;
}

/* Reads a token's stamp. Returns whether it is the token that comes next, as the node sent it. */
static int read_token(Stream *stream, int64_t now) {
  char stamp[STAMP_BYTES + 1] = {0};
  const char *event = stream->event;
  if (stream->event_len != TOKEN_BYTES || memcmp(event, TOKEN_HEAD, HEAD_BYTES) ||
      memcmp(event + HEAD_BYTES + STAMP_BYTES, TOKEN_TAIL, TAIL_BYTES))
    return 0;
  memcpy(stamp, event + HEAD_BYTES, STAMP_BYTES);
  unsigned lateness = (unsigned)strtoul(stamp + 24, NULL, 16);
  stamp[24] = 0;
  unsigned number = (unsigned)strtoul(stamp + 16, NULL, 16);
  stamp[16] = 0;
  int64_t sent = (int64_t)strtoull(stamp, NULL, 16);
  if (number != stream->number) return 0;
  count.tokens++;
  if (number == 0) add(&ttft, now - stream->asked);
  else if (now >= from && now < until) {
    count.window_tokens++;
    add(&lag, now - sent);
    add(&gap, now - stream->seen);
    add(&late, lateness * 1000LL);
  }
  stream->seen = now;
  stream->number++;
  return 1;
}

/* Returns whether the event is the one that comes next. */
static int read_event(Stream *stream, int64_t now) {
  if (stream->number < (uint32_t)tokens) return read_token(stream, now);
  if (!stream->last) {
    int leaked = is(stream, LAST_LEAKED, sizeof LAST_LEAKED - 1);
    if (!leaked && !is(stream, LAST_PLAIN, sizeof LAST_PLAIN - 1)) return 0;
    count.leaked += leaked, count.stripped += !leaked;
    return stream->last = 1;
  }
  if (stream->done || !is(stream, DONE, sizeof DONE - 1)) return 0;
  return stream->done = 1;
}

/* Takes bytes of the body. Returns whether they are what the node sent. */
static int read_body(Stream *stream, const char *data, size_t len, int64_t now) {
  for (size_t i = 0; i < len; i++) {
    if (stream->event_len == EVENT_ROOM) return 0;
    stream->event[stream->event_len++] = data[i];
    if (data[i] != '\n' || stream->event_len < 2 || stream->event[stream->event_len - 2] != '\n') continue;
    if (!read_event(stream, now)) return 0;
    stream->event_len = 0;
  }
  return 1;
}

/* The response's head is whole. Returns its status. */
static int read_head(Stream *stream) {
  stream->head[stream->head_len] = 0;
  const char *length = strcasestr(stream->head, "\r\ncontent-length:");
  stream->part = length ? LENGTH : SIZE;
  stream->room = length ? strtoul(length + 17, NULL, 10) : 0;
  return stream->head_len > 12 ? atoi(stream->head + 9) : 0;
}

static void finish(Stream *stream) {
  if (!stream->done) { count.corrupt++; fail(stream, 0); return; }
  count.finished++;
  if (--stream->left) begin(stream);
  else leave(stream);
}

/* Takes what came. The stream may have gone on to its next request, or be gone, afterwards. */
static void take(Stream *stream, const char *data, size_t len, int64_t now) {
  for (size_t i = 0; i < len && stream->fd >= 0;) {
    if (stream->part == DATA || stream->part == LENGTH) {
      size_t piece = len - i < stream->room ? len - i : stream->room;
      if (!read_body(stream, data + i, piece, now)) { count.corrupt++; fail(stream, 0); return; }
      i += piece;
      stream->room -= piece;
      if (stream->room) continue;
      if (stream->part == LENGTH) { finish(stream); return; }
      stream->part = DATA_END;
      stream->head_len = 0;
      continue;
    }
    if (stream->head_len == EVENT_ROOM - 1) { fail(stream, 0); return; }
    stream->head[stream->head_len++] = data[i++];
    int line = data[i - 1] == '\n', blank = line && stream->head_len >= 4 && !memcmp(stream->head + stream->head_len - 4, "\r\n\r\n", 4);
    if (stream->part == HEAD && blank) {
      int status = read_head(stream);
      if (status != 200) { fail(stream, status); return; }
      stream->head_len = 0;
    } else if (stream->part == SIZE && line) {
      stream->room = strtoul(stream->head, NULL, 16);
      stream->part = stream->room ? DATA : TRAILER;
      stream->head_len = 0;
    } else if (stream->part == DATA_END && line) {
      stream->part = SIZE;
      stream->head_len = 0;
    } else if (stream->part == TRAILER && line) {
      finish(stream);
      return;
    }
  }
}

static void receive(Stream *stream) {
  static char data[READ_BYTES];
  while (stream->fd >= 0) {
    ssize_t got = recv(stream->fd, data, sizeof data, 0);
    if (got < 0 && errno == EAGAIN) return;
    if (got <= 0) { fail(stream, 0); return; }
    take(stream, data, (size_t)got, now_ns());
  }
}

static void read_file(const char *path) {
  FILE *file = checked(fopen(path, "rb"));
  fseek(file, 0, SEEK_END);
  body_len = (size_t)ftell(file);
  rewind(file);
  body = checked(malloc(body_len + 1));
  body_len = fread(body, 1, body_len, file);
  fclose(file);
}

static void report(int streams, int begun, int64_t start) {
  printf("{\"seconds\":%.3f,\"streams\":%d,\"finished\":%ld,\"failed\":%ld,\"unfinished\":%ld,\"corrupt\":%ld,"
         "\"leaked\":%ld,\"stripped\":%ld,\"tokens\":%ld,\"window_tokens\":%ld,\"window_seconds\":%.3f,\"status\":%d",
         (double)(now_ns() - start) / 1e9, streams, count.finished, count.failed, (long)(live + streams - begun),
         count.corrupt, count.leaked, count.stripped, count.tokens, count.window_tokens, (double)(until - from) / 1e9,
         count.status);
  print("lag_us", &lag);
  print("gap_us", &gap);
  print("late_us", &late);
  print("ttft_us", &ttft);
  printf(",\"processes\":{");
  for (int i = 0; i < pid_count; i++)
    printf("%s\"%d\":{\"cpu_s\":%.6f,\"rss_before\":%ld,\"rss\":%ld}", i ? "," : "", pids[i], cpu[1][i] - cpu[0][i],
           rss[0][i], rss[1][i]);
  printf("}}\n");
}

int main(int words, char **word) {
  if (words < 10 || words - 10 > MAX_PIDS) return fputs("see client.c for the usage\n", stderr), 2;
  signal(SIGPIPE, SIG_IGN);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  prctl(PR_SET_TIMERSLACK, 1);
  port = atoi(word[1]);
  read_file(word[2]);
  int streams = atoi(word[3]), begun = 0, edge = 0;
  requests = atoi(word[4]), tokens = atoi(word[5]);
  int64_t stagger = atoll(word[6]) * 1000000, start = now_ns();
  from = start + atoll(word[7]) * 1000000, until = from + atoll(word[8]) * 1000000;
  int64_t end = until + atoll(word[9]) * 1000000;
  for (int i = 10; i < words; i++) pids[pid_count++] = atoi(word[i]);
  poller = epoll_create1(0);
  Stream *all = checked(calloc((size_t)streams, sizeof *all));
  long before[MAX_PIDS];
  read_processes(0);
  memcpy(before, rss[0], sizeof before);
  while (live || begun < streams || edge < 2) {
    int64_t now = now_ns();
    if (now >= end) break;
    if (edge < 2 && now >= (edge ? until : from)) read_processes(edge++);
    while (begun < streams && now >= start + stagger * begun / streams) {
      Stream *stream = &all[begun++];
      stream->left = requests;
      live++;
      if (open_stream(stream)) begin(stream);
      else fail(stream, 0);
    }
    int64_t next = edge == 0 ? from : edge == 1 ? until : end;
    if (begun < streams && start + stagger * begun / streams < next) next = start + stagger * begun / streams;
    int64_t wait = next > now_ns() ? next - now_ns() : 0;
    struct timespec timeout = {wait / 1000000000, wait % 1000000000};
    struct epoll_event events[EVENTS];
    int ready = epoll_pwait2(poller, events, EVENTS, &timeout, NULL);
    for (int i = 0; i < ready; i++) {
      Stream *stream = events[i].data.ptr;
      if (stream->fd >= 0 && events[i].events & EPOLLOUT) push(stream);
      if (stream->fd >= 0 && events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) receive(stream);
    }
    if (!live && begun == streams && from == until) break; /* no window to wait for */
  }
  while (edge < 2) read_processes(edge++);
  memcpy(rss[0], before, sizeof before);
  report(streams, begun, start);
}
