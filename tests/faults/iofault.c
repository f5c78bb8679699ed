/* Make operations on files late, or fail: preloaded, it stands before libc's own.
 *
 * What it counts are operations below one folder: open, create, opendir, write, truncate, fsync, fsyncdir, close
 * (of what was open for writing), rename, link, symlink, unlink, mkdir, rmdir.  An order says which of them are
 * meant, and what is to happen to the n-th of these:
 *
 *   folder=/abs/RUN;op=fsync;path=*.jsonl;n=3;errno=5;last=0;delay_us=0;longest_us=0;seed=1;log=/abs/FILE
 *
 * op      operations meant, joined by ","; none: all         path   pattern of fnmatch, relative to the folder
 * n       0: none fails, all are logged                       errno  the error it fails with
 * last    1: from then on all below the folder fail that can fail with this error, meant or not
 * late    1: it is done, and then reported as failed
 * delay_us, longest_us    those meant wait so long, and up to so long at random
 * rank    an order in the environment is for this rank only ("none": for processes that are no rank)
 *
 * A process takes its order from IOFAULT when it starts (a fork by iofault_arm_by_environment()), or later by
 * iofault_arm().  Counts are a process' own.
 * The log gets a line for each: pid, number among those meant (0: not meant), operation, path, and FAIL.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <limits.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OPEN, CREATE, OPENDIR, WRITE, TRUNCATE, FSYNC, FSYNCDIR, CLOSE, RENAME, LINK, SYMLINK, UNLINK, MKDIR, RMDIR, NUM_OPS };
static const char *const op_names[NUM_OPS] = {"open", "create", "opendir", "write", "truncate", "fsync", "fsyncdir",
    "close", "rename", "link", "symlink", "unlink", "mkdir", "rmdir"};

static volatile int armed;
static char folder[PATH_MAX], pattern[PATH_MAX];
static size_t folder_length;
static unsigned meant_ops;
static long fail_at, count, broken_from;
static int fail_errno, last, late, log_fd = -1;
static long delay_us, longest_us;
static uint64_t seed, draws;
static int torn_fd = -1; /* half of a write to it was done: the next one finds the disk full */

/* What a system call can fail with (its manual page; NFS adds ESTALE). */
static int can_fail(int op, int error)
{
    switch (error) {
    case EROFS: return op == CREATE || op == TRUNCATE || op == RENAME || op == LINK || op == SYMLINK || op == UNLINK
        || op == MKDIR || op == RMDIR;
    case EMFILE: return op == OPEN || op == CREATE || op == OPENDIR;
    case EDQUOT:
    case ENOSPC: return op == CREATE || op == WRITE || op == TRUNCATE || op == FSYNC || op == CLOSE || op == RENAME
            || op == LINK || op == SYMLINK || op == MKDIR;
    case EINTR: return op == OPEN || op == CREATE || op == WRITE || op == TRUNCATE || op == FSYNC || op == FSYNCDIR;
    case ENOENT: return op != WRITE && op != TRUNCATE && op != FSYNC && op != FSYNCDIR && op != CLOSE;
    case EACCES: return op != WRITE && op != TRUNCATE && op != FSYNC && op != FSYNCDIR && op != CLOSE;
    default: return 1;
    }
}
int iofault_can_fail(const char *op, int error)
{
    for (int i = 0; i < NUM_OPS; i++) if (!strcmp(op, op_names[i])) return can_fail(i, error);
    return 0;
}

static void read_setting(char *name, const char *value)
{
    long number = atol(value);
    if (!strcmp(name, "folder")) { snprintf(folder, sizeof folder, "%s", value); folder_length = strlen(folder); }
    else if (!strcmp(name, "path")) snprintf(pattern, sizeof pattern, "%s", value);
    else if (!strcmp(name, "n")) fail_at = number;
    else if (!strcmp(name, "errno")) fail_errno = number;
    else if (!strcmp(name, "last")) last = number;
    else if (!strcmp(name, "late")) late = number;
    else if (!strcmp(name, "delay_us")) delay_us = number;
    else if (!strcmp(name, "longest_us")) longest_us = number;
    else if (!strcmp(name, "seed")) seed = number;
    else if (!strcmp(name, "log")) log_fd = syscall(SYS_openat, AT_FDCWD, value, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    else if (!strcmp(name, "op")) {
        char list[256], *rest, *word;
        snprintf(list, sizeof list, "%s", value);
        for (word = strtok_r(list, ",", &rest); word; word = strtok_r(NULL, ",", &rest))
            for (int i = 0; i < NUM_OPS; i++) if (!strcmp(word, op_names[i])) meant_ops |= 1u << i;
    }
}
void iofault_arm(const char *order)
{
    char text[4 * PATH_MAX], *rest, *setting;
    armed = 0;
    folder[0] = pattern[0] = 0;
    meant_ops = fail_errno = last = late = 0;
    fail_at = count = broken_from = delay_us = longest_us = 0;
    seed = draws = 0;
    log_fd = torn_fd = -1;
    snprintf(text, sizeof text, "%s", order);
    for (setting = strtok_r(text, ";", &rest); setting; setting = strtok_r(NULL, ";", &rest)) {
        char *value = strchr(setting, '=');
        if (!value) continue;
        *value = 0;
        read_setting(setting, value + 1);
    }
    if (!meant_ops) meant_ops = (1u << NUM_OPS) - 1;
    armed = folder_length > 0;
}
__attribute__((constructor)) void iofault_arm_by_environment(void)
{
    const char *order = getenv("IOFAULT"), *wanted = order ? strstr(order, ";rank=") : NULL;
    const char *rank = getenv("OMPI_COMM_WORLD_RANK");
    if (!rank) rank = getenv("RANK");
    if (!rank) rank = "none";
    if (!order) return;
    if (wanted && (strncmp(wanted + 6, rank, strlen(rank)) || !strchr(";", wanted[6 + strlen(rank)]))) return;
    iofault_arm(order);
}

static uint64_t draw(void) /* splitmix64 */
{
    uint64_t z = seed + 0x9e3779b97f4a7c15u * __sync_add_and_fetch(&draws, 1);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* Return the path below the folder, NULL if it is elsewhere; "." for the folder itself. */
static const char *inside(const char *path)
{
    if (strncmp(path, folder, folder_length)) return NULL;
    if (path[folder_length] == 0) return ".";
    return path[folder_length] == '/' ? path + folder_length + 1 : NULL;
}
static int path_of(int fd, char *path)
{
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, PATH_MAX - 1);
    if (n < 0) return 0;
    path[n] = 0;
    return 1;
}
static int absolute(int dir, const char *name, char *path)
{
    if (!name) return 0;
    if (name[0] == '/') { snprintf(path, PATH_MAX, "%s", name); return 1; }
    if (dir == AT_FDCWD ? !getcwd(path, PATH_MAX) : !path_of(dir, path)) return 0;
    size_t n = strlen(path);
    snprintf(path + n, PATH_MAX - n, "/%s", name);
    return 1;
}

/* Count an operation; return the error it is to fail with, or 0. */
static int happens(int op, const char *path)
{
    const char *name = inside(path);
    if (!name) return 0;
    int meant = (meant_ops >> op & 1) && (!pattern[0] || !fnmatch(pattern, name, 0));
    long k = meant ? __sync_add_and_fetch(&count, 1) : 0;
    if (meant && (delay_us || longest_us)) usleep(delay_us + (longest_us ? draw() % longest_us : 0));
    int now = meant && k == fail_at && fail_at > 0;
    if (now && last) broken_from = 1;
    int fails = (now || broken_from) && can_fail(op, fail_errno);
    if (log_fd >= 0) {
        char line[PATH_MAX + 100];
        int n = snprintf(line, sizeof line, "%d %ld %s %s%s\n", (int)getpid(), k, op_names[op], name, fails ? " FAIL" : "");
        syscall(SYS_write, log_fd, line, n);
    }
    return fails ? fail_errno : 0;
}
static int at(int op, int dir, const char *name)
{
    char path[PATH_MAX];
    int before = errno, error = absolute(dir, name, path) ? happens(op, path) : 0;
    errno = before;
    return error;
}
static int on(int op, int fd)
{
    char path[PATH_MAX];
    int before = errno, error = path_of(fd, path) ? happens(op, path) : 0;
    errno = before;
    return error;
}
static int opened(int dir, const char *name, int flags)
{
    char path[PATH_MAX];
    struct stat is;
    int before = errno, error = 0;
    if (absolute(dir, name, path) && inside(path)) {
        int writes = (flags & O_CREAT) || (flags & O_ACCMODE) != O_RDONLY;
        int is_folder = !writes && ((flags & O_DIRECTORY) || (!stat(path, &is) && S_ISDIR(is.st_mode)));
        error = happens(writes ? CREATE : is_folder ? OPENDIR : OPEN, path);
    }
    errno = before;
    return error;
}
static int synced(int fd)
{
    struct stat is;
    return on(!fstat(fd, &is) && S_ISDIR(is.st_mode) ? FSYNCDIR : FSYNC, fd);
}
/* Return how many of the bytes may be written, or -1 with errno. */
static ssize_t may_write(int fd, size_t num)
{
    int error;
    if (fd == log_fd) return num;
    if (torn_fd == fd) { torn_fd = -1; errno = fail_errno; return -1; }
    error = on(WRITE, fd);
    if (!error) return num;
    if (error == ENOSPC && num > 1) { torn_fd = fd; return num / 2; } /* as a disk gets full */
    errno = error;
    return -1;
}

#define REAL(result, name, ...) static result (*real)(__VA_ARGS__); if (!real) real = (result (*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name)
/* Fail before, or after it was done. */
#define FAIL_OR(error, call) do { int e_ = armed ? (error) : 0; if (e_ && !late) { errno = e_; return -1; } \
    __typeof__(call) r_ = (call); if (e_ && r_ >= 0) { errno = e_; return -1; } return r_; } while (0)
#define OPENED(dir, call) do { int e_ = armed ? opened(dir, p, f) : 0; if (e_) { errno = e_; return -1; } return (call); } while (0)
#define MODE mode_t m = 0; if (f & (O_CREAT | __O_TMPFILE)) { va_list a; va_start(a, f); m = va_arg(a, mode_t); va_end(a); }

int open(const char *p, int f, ...) { REAL(int, open, const char *, int, ...); MODE OPENED(AT_FDCWD, real(p, f, m)); }
int open64(const char *p, int f, ...) { REAL(int, open64, const char *, int, ...); MODE OPENED(AT_FDCWD, real(p, f, m)); }
int openat(int d, const char *p, int f, ...) { REAL(int, openat, int, const char *, int, ...); MODE OPENED(d, real(d, p, f, m)); }
int openat64(int d, const char *p, int f, ...) { REAL(int, openat64, int, const char *, int, ...); MODE OPENED(d, real(d, p, f, m)); }
int __open_2(const char *p, int f) { REAL(int, __open_2, const char *, int); OPENED(AT_FDCWD, real(p, f)); }
int __open64_2(const char *p, int f) { REAL(int, __open64_2, const char *, int); OPENED(AT_FDCWD, real(p, f)); }
int __openat_2(int d, const char *p, int f) { REAL(int, __openat_2, int, const char *, int); OPENED(d, real(d, p, f)); }
int __openat64_2(int d, const char *p, int f) { REAL(int, __openat64_2, int, const char *, int); OPENED(d, real(d, p, f)); }
int creat(const char *p, mode_t m) { REAL(int, creat, const char *, mode_t); int f = O_CREAT; OPENED(AT_FDCWD, real(p, m)); }

static int opened_as(const char *path, const char *mode)
{
    return armed ? opened(AT_FDCWD, path, mode[0] == 'r' && !strchr(mode, '+') ? O_RDONLY : O_CREAT) : 0;
}
FILE *fopen(const char *p, const char *mode)
{
    REAL(FILE *, fopen, const char *, const char *);
    int error = opened_as(p, mode);
    if (error) { errno = error; return NULL; }
    return real(p, mode);
}
FILE *fopen64(const char *p, const char *mode)
{
    REAL(FILE *, fopen64, const char *, const char *);
    int error = opened_as(p, mode);
    if (error) { errno = error; return NULL; }
    return real(p, mode);
}
DIR *opendir(const char *p)
{
    REAL(DIR *, opendir, const char *);
    int error = armed ? at(OPENDIR, AT_FDCWD, p) : 0;
    if (error) { errno = error; return NULL; }
    return real(p);
}

#define WRITTEN(num, whole, part) do { if (!armed) return (whole); ssize_t n_ = may_write(d, num); if (n_ < 0) return -1; \
    return (size_t)n_ == (size_t)(num) ? (whole) : (part); } while (0)
static size_t total(const struct iovec *v, int c) { size_t n = 0; for (int i = 0; i < c; i++) n += v[i].iov_len; return n; }

ssize_t write(int d, const void *b, size_t n) { REAL(ssize_t, write, int, const void *, size_t); WRITTEN(n, real(d, b, n), real(d, b, n_)); }
ssize_t pwrite(int d, const void *b, size_t n, off_t o) { REAL(ssize_t, pwrite, int, const void *, size_t, off_t); WRITTEN(n, real(d, b, n, o), real(d, b, n_, o)); }
ssize_t pwrite64(int d, const void *b, size_t n, off64_t o) { REAL(ssize_t, pwrite64, int, const void *, size_t, off64_t); WRITTEN(n, real(d, b, n, o), real(d, b, n_, o)); }
/* Half of several pieces: the first alone, or half of it where it is the only one. */
#define SOME (c > 1 ? v[0].iov_len : v[0].iov_len / 2)
ssize_t writev(int d, const struct iovec *v, int c) { REAL(ssize_t, writev, int, const struct iovec *, int); WRITTEN(total(v, c), real(d, v, c), write(d, v[0].iov_base, SOME)); }
ssize_t pwritev(int d, const struct iovec *v, int c, off_t o) { REAL(ssize_t, pwritev, int, const struct iovec *, int, off_t); WRITTEN(total(v, c), real(d, v, c, o), pwrite(d, v[0].iov_base, SOME, o)); }
ssize_t pwritev64(int d, const struct iovec *v, int c, off64_t o) { REAL(ssize_t, pwritev64, int, const struct iovec *, int, off64_t); WRITTEN(total(v, c), real(d, v, c, o), pwrite64(d, v[0].iov_base, SOME, o)); }
ssize_t sendfile(int d, int s, off_t *o, size_t n) { REAL(ssize_t, sendfile, int, int, off_t *, size_t); WRITTEN(n, real(d, s, o, n), real(d, s, o, n_)); }
ssize_t sendfile64(int d, int s, off64_t *o, size_t n) { REAL(ssize_t, sendfile64, int, int, off64_t *, size_t); WRITTEN(n, real(d, s, o, n), real(d, s, o, n_)); }
ssize_t copy_file_range(int s, off64_t *a, int d, off64_t *b, size_t n, unsigned f) { REAL(ssize_t, copy_file_range, int, off64_t *, int, off64_t *, size_t, unsigned); WRITTEN(n, real(s, a, d, b, n, f), real(s, a, d, b, n_, f)); }

int ftruncate(int d, off_t n) { REAL(int, ftruncate, int, off_t); FAIL_OR(on(TRUNCATE, d), real(d, n)); }
int ftruncate64(int d, off64_t n) { REAL(int, ftruncate64, int, off64_t); FAIL_OR(on(TRUNCATE, d), real(d, n)); }
int truncate(const char *p, off_t n) { REAL(int, truncate, const char *, off_t); FAIL_OR(at(TRUNCATE, AT_FDCWD, p), real(p, n)); }
int fsync(int d) { REAL(int, fsync, int); FAIL_OR(synced(d), real(d)); }
int fdatasync(int d) { REAL(int, fdatasync, int); FAIL_OR(synced(d), real(d)); }
int close(int d)
{
    REAL(int, close, int);
    int flags, error = 0;
    if (armed && d >= 0 && d != log_fd && (flags = (int)syscall(SYS_fcntl, d, F_GETFL)) >= 0 && (flags & O_ACCMODE) != O_RDONLY)
        error = on(CLOSE, d);
    if (d == torn_fd) torn_fd = -1;
    int result = real(d); /* it is closed whatever it reports */
    if (error) { errno = error; return -1; }
    return result;
}
int rename(const char *a, const char *b) { REAL(int, rename, const char *, const char *); FAIL_OR(at(RENAME, AT_FDCWD, b), real(a, b)); }
int renameat(int x, const char *a, int y, const char *b) { REAL(int, renameat, int, const char *, int, const char *); FAIL_OR(at(RENAME, y, b), real(x, a, y, b)); }
int renameat2(int x, const char *a, int y, const char *b, unsigned f) { REAL(int, renameat2, int, const char *, int, const char *, unsigned); FAIL_OR(at(RENAME, y, b), real(x, a, y, b, f)); }
int link(const char *a, const char *b) { REAL(int, link, const char *, const char *); FAIL_OR(at(LINK, AT_FDCWD, b), real(a, b)); }
int linkat(int x, const char *a, int y, const char *b, int f) { REAL(int, linkat, int, const char *, int, const char *, int); FAIL_OR(at(LINK, y, b), real(x, a, y, b, f)); }
int symlink(const char *a, const char *b) { REAL(int, symlink, const char *, const char *); FAIL_OR(at(SYMLINK, AT_FDCWD, b), real(a, b)); }
int symlinkat(const char *a, int y, const char *b) { REAL(int, symlinkat, const char *, int, const char *); FAIL_OR(at(SYMLINK, y, b), real(a, y, b)); }
int unlink(const char *a) { REAL(int, unlink, const char *); FAIL_OR(at(UNLINK, AT_FDCWD, a), real(a)); }
int unlinkat(int d, const char *a, int f) { REAL(int, unlinkat, int, const char *, int); FAIL_OR(at(f & AT_REMOVEDIR ? RMDIR : UNLINK, d, a), real(d, a, f)); }
int mkdir(const char *a, mode_t m) { REAL(int, mkdir, const char *, mode_t); FAIL_OR(at(MKDIR, AT_FDCWD, a), real(a, m)); }
int mkdirat(int d, const char *a, mode_t m) { REAL(int, mkdirat, int, const char *, mode_t); FAIL_OR(at(MKDIR, d, a), real(d, a, m)); }
int rmdir(const char *a) { REAL(int, rmdir, const char *); FAIL_OR(at(RMDIR, AT_FDCWD, a), real(a)); }
