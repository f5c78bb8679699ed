/* A switch in one process: `switch PORTS BYTES_PER_S LATENCY_US`.
 *
 * It makes TAP devices port1, port2, ..., which become the nodes' eth0.  A frame takes its bytes' time on the link of its
 * sender and on that of its receiver, both at once (cut through), as soon as both are free in that direction, and arrives a
 * latency later; nothing is lost.  Acknowledgements without data wait for no link, as hosts queue fairly: behind the data
 * that their host sends they would hold up those who wait for them.  The kernel hands over segments of up to 64 KB with their offload headers, so it costs
 * little of a core.  Nodes' addresses end with their number: 02:00:00:00:00:NN.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#define MOST_PORTS 255
#define LONGEST 70000 /* bytes of a segment with its headers */
#define OFFLOAD_HEADER 10
#define SEGMENTS_AT_ONCE 32

typedef struct segment {
  struct segment *next;
  int64_t due; /* ns */
  ssize_t length;
  char bytes[];
} segment;

typedef struct {
  segment *first, *last; /* under way to a node, in the order in which they arrive */
} lane;

typedef struct {
  int device;
  int64_t sends_until, receives_until; /* ns: when each direction of the link is free */
  lane lanes[2];                       /* data, and acknowledgements */
} port;

static port ports[MOST_PORTS];
static int num_ports;
static double ns_per_byte;
static int64_t latency_ns;

static int64_t now_ns(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1000000000LL + time.tv_nsec;
}

static int64_t later(int64_t a, int64_t b) { return a > b ? a : b; }

static int open_port(int number) {
  struct ifreq request;
  int device = open("/dev/net/tun", O_RDWR | O_NONBLOCK);
  memset(&request, 0, sizeof request);
  snprintf(request.ifr_name, IFNAMSIZ, "port%d", number);
  request.ifr_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR;
  if (device < 0 || ioctl(device, TUNSETIFF, &request) < 0 ||
      ioctl(device, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4) < 0) {
    perror("switch: /dev/net/tun");
    exit(1);
  }
  return device;
}

/* Whether a frame is TCP over IPv4 and has no data. */
static int only_acknowledges(const unsigned char *frame, ssize_t length) {
  const unsigned char *ip = frame + 14, *tcp = ip + 4 * (ip[0] & 15);
  return length >= 54 && length < 200 && frame[12] == 8 && frame[13] == 0 && ip[9] == 6 && !(tcp[13] & 7) &&
         256 * ip[2] + ip[3] == tcp - ip + 4 * (tcp[12] >> 4);
}

static void send_to(port *sender, port *receiver, const char *bytes, ssize_t length) {
  int short_cut = only_acknowledges((const unsigned char *)bytes + OFFLOAD_HEADER, length - OFFLOAD_HEADER);
  int64_t takes = (int64_t)((length - OFFLOAD_HEADER) * ns_per_byte);
  lane *way = &receiver->lanes[short_cut];
  segment *one = malloc(sizeof *one + length);
  if (one == NULL) exit(1);
  one->due = now_ns() + latency_ns;
  if (!short_cut) {
    int64_t begins = later(now_ns(), sender->sends_until);
    sender->sends_until = begins + takes;
    receiver->receives_until = later(receiver->receives_until, begins) + takes;
    one->due = receiver->receives_until + latency_ns;
  }
  one->length = length;
  one->next = NULL;
  memcpy(one->bytes, bytes, length);
  if (way->last)
    way->last->next = one;
  else
    way->first = one;
  way->last = one;
}

static void forward(int from, const char *bytes, ssize_t length) {
  const unsigned char *to = (const unsigned char *)bytes + OFFLOAD_HEADER;
  if (length < OFFLOAD_HEADER + 14) return;
  if (!(to[0] & 1)) { /* one node; the switch itself has no address */
    int number = to[5] - 1;
    if (number >= 0 && number < num_ports && number != from) send_to(&ports[from], &ports[number], bytes, length);
    return;
  }
  for (int number = 0; number < num_ports; number++)
    if (number != from) send_to(&ports[from], &ports[number], bytes, length);
}

/* Hand over what has arrived; return when the next segment does, ns, or -1. */
static int64_t deliver(void) {
  int64_t next = -1;
  for (int number = 0; number < 2 * num_ports; number++) {
    port *here = &ports[number / 2];
    lane *way = &here->lanes[number % 2];
    while (way->first && way->first->due <= now_ns()) {
      segment *one = way->first;
      if (write(here->device, one->bytes, one->length) < 0 && errno == EAGAIN) break;
      way->first = one->next;
      if (!way->first) way->last = NULL;
      free(one);
    }
    if (way->first && (next < 0 || way->first->due < next)) next = way->first->due;
  }
  return next;
}

int main(int count, char **arguments) {
  static char bytes[LONGEST];
  struct epoll_event event = {.events = EPOLLIN}, events[MOST_PORTS];
  int poll = epoll_create1(0);
  if (count != 4 || (num_ports = atoi(arguments[1])) < 1 || num_ports > MOST_PORTS) return 2;
  ns_per_byte = 1e9 / atof(arguments[2]);
  latency_ns = (int64_t)(1000 * atof(arguments[3]));
  prctl(PR_SET_TIMERSLACK, 1000UL);
  for (int number = 0; number < num_ports; number++) {
    ports[number].device = open_port(number + 1);
    event.data.u32 = number;
    epoll_ctl(poll, EPOLL_CTL_ADD, ports[number].device, &event);
  }
  puts("ready");
  fflush(stdout);
  for (;;) {
    int64_t next = deliver(), left = next < 0 ? 0 : later(next - now_ns(), 0);
    struct timespec wait = {left / 1000000000, left % 1000000000};
    int found = epoll_pwait2(poll, events, MOST_PORTS, next < 0 ? NULL : &wait, NULL);
    if (found < 0 && errno != EINTR) return 1;
    for (int i = 0; i < found; i++)
      for (int read_now = 0; read_now < SEGMENTS_AT_ONCE; read_now++) {
        ssize_t length = read(ports[events[i].data.u32].device, bytes, sizeof bytes);
        if (length <= 0) break;
        forward(events[i].data.u32, bytes, length);
      }
  }
}
