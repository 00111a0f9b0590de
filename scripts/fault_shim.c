/* Makes system calls on files under one path fail, fall short, or be the last of the process.
 *
 * Loaded before libc (LD_PRELOAD) by save_trials.py, which arms it for one save at a time:
 * the n-th call from then on, of those that change a file or make it durable, is the faulty
 * one. Calls that are not armed, and those on other paths, pass through. Linux.
 */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum action { NOTHING, KILL, FAIL, SHORT };

static char prefix[4096];
static size_t prefix_length;
static atomic_long calls, faults;
static long first;
static int what, number, forever, armed;
static char names[65536];
static atomic_size_t names_end;

/* Counts from here; call `n` (1 is the next) is the faulty one, 0 for none. */
void shim_arm(const char *path, long n, int action, int error, int from_then_on) {
    snprintf(prefix, sizeof prefix, "%s", path);
    prefix_length = strlen(prefix);
    first = n, what = action, number = error, forever = from_then_on;
    atomic_store(&calls, 0), atomic_store(&faults, 0), atomic_store(&names_end, 0);
    names[0] = 0, armed = 1;
}

void shim_disarm(void) { armed = 0; }
long shim_calls(void) { return atomic_load(&calls); }
long shim_faults(void) { return atomic_load(&faults); }
/* The calls since shim_arm, one a line: the function, and the path. */
const char *shim_names(void) { return names; }

static int below(const char *path) {
    return !strncmp(path, prefix, prefix_length) &&
           (path[prefix_length] == 0 || path[prefix_length] == '/');
}

static void of_fd(int fd, char *path, size_t size) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, size - 1);
    path[length < 0 ? 0 : length] = 0;
}

static void note(const char *name, const char *path) {
    char line[4400];
    int length = snprintf(line, sizeof line, "%s %s\n", name, path + prefix_length);
    size_t at = atomic_fetch_add(&names_end, (size_t)length);
    if (at + (size_t)length < sizeof names) memcpy(names + at, line, (size_t)length);
}

/* What is to happen to this call. */
static enum action judge(const char *name, const char *path) {
    if (!armed || !below(path)) return NOTHING;
    long n = atomic_fetch_add(&calls, 1) + 1;
    note(name, path);
    if (!first || n < first || (n > first && !forever)) return NOTHING;
    if (what == SHORT && !strstr(name, "write")) return NOTHING;
    atomic_fetch_add(&faults, 1);
    if (what == KILL) syscall(SYS_kill, getpid(), SIGKILL);
    return (enum action)what;
}

static enum action judge_fd(const char *name, int fd) {
    if (!armed) return NOTHING;
    char path[4096];
    of_fd(fd, path, sizeof path);
    return judge(name, path);
}

static enum action judge_at(const char *name, int folder, const char *path) {
    if (!armed) return NOTHING;
    char whole[8300];
    if (path[0] == '/') return judge(name, path);
    if (folder == AT_FDCWD) {
        if (!getcwd(whole, 4096)) return NOTHING;
    } else {
        of_fd(folder, whole, 4096);
    }
    size_t length = strlen(whole);
    snprintf(whole + length, sizeof whole - length, "/%s", path);
    return judge(name, whole);
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define FAILS(action) if ((action) == FAIL) { errno = number; return -1; }
/* A function that takes a path, or an open file, first: as it is, but judged before. */
#define ON_PATH(type, name, parameters, path, arguments)                                    \
    type name parameters { FAILS(judge_at(#name, AT_FDCWD, path)) return NEXT(name) arguments; }
#define ON_FD(type, name, parameters, fd, arguments)                                        \
    type name parameters { FAILS(judge_fd(#name, fd)) return NEXT(name) arguments; }
#define ON_AT(type, name, parameters, folder, path, arguments)                              \
    type name parameters { FAILS(judge_at(#name, folder, path)) return NEXT(name) arguments; }

ON_FD(int, fsync, (int fd), fd, (fd))
ON_FD(int, fdatasync, (int fd), fd, (fd))
ON_FD(int, ftruncate, (int fd, off_t size), fd, (fd, size))
ON_FD(int, ftruncate64, (int fd, off64_t size), fd, (fd, size))
ON_FD(int, fchmod, (int fd, mode_t mode), fd, (fd, mode))
ON_PATH(int, rename, (const char *from, const char *to), to, (from, to))
ON_AT(int, renameat, (int a, const char *from, int b, const char *to), b, to, (a, from, b, to))
ON_AT(int, renameat2, (int a, const char *from, int b, const char *to, unsigned flags), b, to,
      (a, from, b, to, flags))
ON_PATH(int, link, (const char *from, const char *to), to, (from, to))
ON_AT(int, linkat, (int a, const char *from, int b, const char *to, int flags), b, to,
      (a, from, b, to, flags))
ON_PATH(int, symlink, (const char *from, const char *to), to, (from, to))
ON_PATH(int, unlink, (const char *path), path, (path))
ON_AT(int, unlinkat, (int folder, const char *path, int flags), folder, path, (folder, path, flags))
ON_PATH(int, rmdir, (const char *path), path, (path))
ON_PATH(int, mkdir, (const char *path, mode_t mode), path, (path, mode))
ON_AT(int, mkdirat, (int folder, const char *path, mode_t mode), folder, path, (folder, path, mode))

/* A write can be cut in half as well. */
#define WRITES(name, parameters, arguments, half)                                           \
    ssize_t name parameters {                                                               \
        enum action action = judge_fd(#name, fd);                                           \
        FAILS(action)                                                                       \
        if (action == SHORT) return NEXT(name) half;                                        \
        return NEXT(name) arguments;                                                        \
    }
#define HALF(n) ((n) > 1 ? (n) / 2 : (n))

WRITES(write, (int fd, const void *from, size_t n), (fd, from, n), (fd, from, HALF(n)))
WRITES(pwrite, (int fd, const void *from, size_t n, off_t at), (fd, from, n, at),
       (fd, from, HALF(n), at))
WRITES(pwrite64, (int fd, const void *from, size_t n, off64_t at), (fd, from, n, at),
       (fd, from, HALF(n), at))
WRITES(writev, (int fd, const struct iovec *from, int n), (fd, from, n), (fd, from, HALF(n)))
WRITES(pwritev, (int fd, const struct iovec *from, int n, off_t at), (fd, from, n, at),
       (fd, from, HALF(n), at))
WRITES(pwritev64, (int fd, const struct iovec *from, int n, off64_t at), (fd, from, n, at),
       (fd, from, HALF(n), at))
WRITES(pwritev2, (int fd, const struct iovec *from, int n, off_t at, int flags),
       (fd, from, n, at, flags), (fd, from, HALF(n), at, flags))
WRITES(pwritev64v2, (int fd, const struct iovec *from, int n, off64_t at, int flags),
       (fd, from, n, at, flags), (fd, from, HALF(n), at, flags))

ON_FD(ssize_t, sendfile, (int to, int from, off_t *at, size_t n), to, (to, from, at, n))
ON_FD(ssize_t, sendfile64, (int to, int from, off64_t *at, size_t n), to, (to, from, at, n))
ON_FD(ssize_t, copy_file_range,
      (int from, off64_t *at, int to, off64_t *there, size_t n, unsigned flags), to,
      (from, at, to, there, n, flags))

static mode_t mode_of(int flags, va_list arguments) {
    return flags & (O_CREAT | __O_TMPFILE) ? va_arg(arguments, mode_t) : 0;
}

#define OPENS(name)                                                                         \
    int name(const char *path, int flags, ...) {                                            \
        va_list arguments;                                                                  \
        va_start(arguments, flags);                                                         \
        mode_t mode = mode_of(flags, arguments);                                            \
        va_end(arguments);                                                                  \
        if (flags & O_CREAT) FAILS(judge_at(#name, AT_FDCWD, path))                         \
        return NEXT(name)(path, flags, mode);                                               \
    }
#define OPENS_AT(name)                                                                      \
    int name(int folder, const char *path, int flags, ...) {                                \
        va_list arguments;                                                                  \
        va_start(arguments, flags);                                                         \
        mode_t mode = mode_of(flags, arguments);                                            \
        va_end(arguments);                                                                  \
        if (flags & O_CREAT) FAILS(judge_at(#name, folder, path))                           \
        return NEXT(name)(folder, path, flags, mode);                                       \
    }

OPENS(open)
OPENS(open64)
OPENS_AT(openat)
OPENS_AT(openat64)

int creat(const char *path, mode_t mode) { return open(path, O_CREAT | O_WRONLY | O_TRUNC, mode); }
int creat64(const char *path, mode_t mode) { return open64(path, O_CREAT | O_WRONLY | O_TRUNC, mode); }
