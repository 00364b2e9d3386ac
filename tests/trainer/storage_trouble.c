// Storage trouble for one process: `LD_PRELOAD` of this library makes system calls on paths with given prefixes fail or wait.
// The trouble is read from a file mapped from $STORAGE_TROUBLE, so that it begins and ends while the process runs (storage_trouble.py).
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { NONE, FULL, INODES, READ_ONLY, BROKEN, STALE, GONE, SLOW, LATE, LOST, STUCK };
enum { READ, WRITE, CREATE, CHANGE, SYNC, LOOK };  // what a call does: CHANGE renames or deletes, LOOK asks for a name

struct control {
  volatile int kind, delay_ms, hits, renames;
  char prefixes[4000];  // separated by newlines
};
static struct control *control;

__attribute__((constructor)) static void begin(void) {
  const char *path = getenv("STORAGE_TROUBLE");
  int fd = path ? syscall(SYS_openat, AT_FDCWD, path, O_RDWR) : -1;
  if (fd < 0) return;
  void *found = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  syscall(SYS_close, fd);
  if (found != MAP_FAILED) control = found;
}

static int below(const char *path) {
  for (const char *prefix = control->prefixes; *prefix;) {
    size_t length = strcspn(prefix, "\n");
    if (length && !strncmp(path, prefix, length)) return 1;
    prefix += length + (prefix[length] == '\n');
  }
  return 0;
}

static void pause_ms(int ms) {
  struct timespec wait = {ms / 1000, (ms % 1000) * 1000000L};
  nanosleep(&wait, NULL);
}

// Wait in the kernel for a lock on the file, or on the nearest directory that exists, which this process holds itself.
static void stuck_at(const char *path) {
  char name[PATH_MAX];
  int fd = -1;
  if (snprintf(name, sizeof name, "%s", path) >= (int)sizeof name) return;
  while ((fd = syscall(SYS_openat, AT_FDCWD, name, O_RDONLY | O_CLOEXEC)) < 0 && strrchr(name, '/') > name) *strrchr(name, '/') = 0;
  int holder = syscall(SYS_openat, AT_FDCWD, name, O_RDONLY | O_CLOEXEC);
  flock(holder, LOCK_EX | LOCK_NB);  // fails where another thread waits already
  while (control->kind == STUCK && flock(fd, LOCK_EX)) {}
  syscall(SYS_close, fd);
  syscall(SYS_close, holder);
}

// Return 0, or set errno and return -1.
static int trouble(const char *path, int what, int exists) {
  if (!control || control->kind == NONE || !path || !below(path)) return 0;
  int kind = control->kind, error = 0;
  switch (kind) {
    case FULL: error = what == WRITE || (what == CREATE && !exists) ? ENOSPC : 0; break;
    case INODES: error = what == CREATE && !exists ? ENOSPC : 0; break;
    case READ_ONLY: error = what == WRITE || what == CREATE || what == CHANGE ? EROFS : 0; break;
    case BROKEN: error = what == LOOK ? 0 : EIO; break;
    case STALE: error = ESTALE; break;
    case GONE: error = what == READ || what == WRITE || what == SYNC ? 0 : ENOENT; break;
    case SLOW: __sync_fetch_and_add(&control->hits, 1); pause_ms(control->delay_ms); return 0;
    case STUCK: __sync_fetch_and_add(&control->hits, 1); stuck_at(path); return 0;
  }
  if (!error) return 0;
  __sync_fetch_and_add(&control->hits, 1);
  errno = error;
  return -1;
}

static const char *absolute(int directory, const char *path, char *buffer) {
  char base[PATH_MAX];
  if (!path) return NULL;
  if (path[0] == '/') return path;
  if (directory == AT_FDCWD) {
    if (!getcwd(base, sizeof base)) return path;
  } else {
    char name[64];
    snprintf(name, sizeof name, "/proc/self/fd/%d", directory);
    ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, name, base, sizeof base - 1);
    if (length < 0) return path;
    base[length] = 0;
  }
  return snprintf(buffer, PATH_MAX, "%s/%s", base, path) < PATH_MAX ? buffer : path;
}

static int active(void) { return control && control->kind != NONE; }

static int at_path(int directory, const char *path, int what) {
  if (!active()) return 0;
  char buffer[PATH_MAX];
  const char *full = absolute(directory, path, buffer);
  struct stat found;
  return trouble(full, what, full && syscall(SYS_newfstatat, AT_FDCWD, full, &found, AT_SYMLINK_NOFOLLOW) == 0);
}

static int at_file(int fd, int what) {
  if (!active()) return 0;
  char name[64], path[PATH_MAX];
  snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
  ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, name, path, sizeof path - 1);
  if (length < 0) return 0;
  path[length] = 0;
  return trouble(path, what, 1);
}

static int at_open(int directory, const char *path, int flags) {
  return at_path(directory, path, flags & O_CREAT ? CREATE : flags & (O_WRONLY | O_RDWR | O_TRUNC) ? CREATE : LOOK);
}

#define NEXT(type, name, ...) ((type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, name))
#define MODE(flags)                         \
  mode_t mode = 0;                          \
  if ((flags) & (O_CREAT | O_TMPFILE)) {    \
    va_list list;                           \
    va_start(list, flags);                  \
    mode = va_arg(list, mode_t);            \
    va_end(list);                           \
  }
#define OPEN(name)                                                 \
  int name(const char *path, int flags, ...) {                     \
    MODE(flags)                                                    \
    if (at_open(AT_FDCWD, path, flags)) return -1;                 \
    return NEXT(int, #name, const char *, int, mode_t)(path, flags, mode); \
  }
OPEN(open)
OPEN(open64)
#define OPENAT(name)                                                    \
  int name(int directory, const char *path, int flags, ...) {           \
    MODE(flags)                                                         \
    if (at_open(directory, path, flags)) return -1;                     \
    return NEXT(int, #name, int, const char *, int, mode_t)(directory, path, flags, mode); \
  }
OPENAT(openat)
OPENAT(openat64)
#define FOPEN(name)                                                                  \
  FILE *name(const char *path, const char *mode) {                                   \
    if (at_path(AT_FDCWD, path, strpbrk(mode, "wa+") ? CREATE : LOOK)) return NULL;  \
    return NEXT(FILE *, #name, const char *, const char *)(path, mode);              \
  }
FOPEN(fopen)
FOPEN(fopen64)
#define ON_FILE(type, name, what, parameters, ...)   \
  type name parameters {                             \
    if (at_file(fd, what)) return -1;                \
    type(*next) parameters = dlsym(RTLD_NEXT, #name); \
    return next(__VA_ARGS__);                        \
  }
ON_FILE(ssize_t, write, WRITE, (int fd, const void *data, size_t size), fd, data, size)
ON_FILE(ssize_t, pwrite, WRITE, (int fd, const void *data, size_t size, off_t at), fd, data, size, at)
ON_FILE(ssize_t, pwrite64, WRITE, (int fd, const void *data, size_t size, off64_t at), fd, data, size, at)
ON_FILE(ssize_t, writev, WRITE, (int fd, const struct iovec *data, int count), fd, data, count)
ON_FILE(ssize_t, pwritev, WRITE, (int fd, const struct iovec *data, int count, off_t at), fd, data, count, at)
ON_FILE(ssize_t, pwritev64, WRITE, (int fd, const struct iovec *data, int count, off64_t at), fd, data, count, at)
ON_FILE(int, fallocate, WRITE, (int fd, int mode, off_t at, off_t size), fd, mode, at, size)
ON_FILE(int, fallocate64, WRITE, (int fd, int mode, off64_t at, off64_t size), fd, mode, at, size)
ON_FILE(ssize_t, send, WRITE, (int fd, const void *data, size_t size, int flags), fd, data, size, flags)
ON_FILE(ssize_t, sendmsg, WRITE, (int fd, const struct msghdr *message, int flags), fd, message, flags)
ON_FILE(ssize_t, read, READ, (int fd, void *data, size_t size), fd, data, size)
ON_FILE(ssize_t, pread, READ, (int fd, void *data, size_t size, off_t at), fd, data, size, at)
ON_FILE(ssize_t, pread64, READ, (int fd, void *data, size_t size, off64_t at), fd, data, size, at)
ON_FILE(int, fsync, SYNC, (int fd), fd)
ON_FILE(int, fdatasync, SYNC, (int fd), fd)
ON_FILE(int, ftruncate, CHANGE, (int fd, off_t size), fd, size)
ON_FILE(int, ftruncate64, CHANGE, (int fd, off64_t size), fd, size)
#define ON_PATH(type, name, directory, what, failed, parameters, ...) \
  type name parameters {                                      \
    if (at_path(directory, path, what)) return failed;        \
    type(*next) parameters = dlsym(RTLD_NEXT, #name);         \
    return next(__VA_ARGS__);                                 \
  }
ON_PATH(int, mkdir, AT_FDCWD, CREATE, -1, (const char *path, mode_t mode), path, mode)
ON_PATH(int, mkdirat, directory, CREATE, -1, (int directory, const char *path, mode_t mode), directory, path, mode)
ON_PATH(int, unlink, AT_FDCWD, CHANGE, -1, (const char *path), path)
ON_PATH(int, unlinkat, directory, CHANGE, -1, (int directory, const char *path, int flags), directory, path, flags)
ON_PATH(int, rmdir, AT_FDCWD, CHANGE, -1, (const char *path), path)
// A slow server: the rename takes effect in the middle of a long call. A lost reply, every second one: the client repeats a rename that
// has happened.
static int renamed(int directory, const char *path, int at, const char *to) {
  if (at_path(directory, path, CHANGE)) return -1;
  char buffer[PATH_MAX];
  const char *full = active() ? absolute(directory, path, buffer) : NULL;
  int late = full && below(full) && control->kind == LATE, lost = full && below(full) && control->kind == LOST && !(control->renames++ % 2);
  if (late || lost) __sync_fetch_and_add(&control->hits, 1);
  if (late) pause_ms(control->delay_ms / 2);
  int done = syscall(SYS_renameat2, directory, path, at, to, 0);
  if (late) pause_ms(control->delay_ms / 2);
  if (!done && lost) {
    errno = ENOENT;
    return -1;
  }
  return done;
}
int rename(const char *path, const char *to) { return renamed(AT_FDCWD, path, AT_FDCWD, to); }
int renameat(int directory, const char *path, int at, const char *to) { return renamed(directory, path, at, to); }
ON_PATH(int, link, AT_FDCWD, CHANGE, -1, (const char *path, const char *to), path, to)
ON_PATH(int, stat, AT_FDCWD, LOOK, -1, (const char *path, struct stat *found), path, found)
ON_PATH(int, stat64, AT_FDCWD, LOOK, -1, (const char *path, struct stat64 *found), path, found)
ON_PATH(int, lstat, AT_FDCWD, LOOK, -1, (const char *path, struct stat *found), path, found)
ON_PATH(int, lstat64, AT_FDCWD, LOOK, -1, (const char *path, struct stat64 *found), path, found)
ON_PATH(int, fstatat, directory, LOOK, -1, (int directory, const char *path, struct stat *found, int flags), directory, path, found, flags)
ON_PATH(int, fstatat64, directory, LOOK, -1, (int directory, const char *path, struct stat64 *found, int flags), directory, path, found, flags)
ON_PATH(int, access, AT_FDCWD, LOOK, -1, (const char *path, int mode), path, mode)
ON_PATH(DIR *, opendir, AT_FDCWD, LOOK, NULL, (const char *path), path)
