// Every call that touches a file below SLOW_FOLDER waits first, DELAY_US microseconds: what a
// process sees of a disk that is overloaded, or far away. Preloaded by test_disks.py.
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int is_slow(const char* path) {
  const char* folder = getenv("SLOW_FOLDER");
  return folder && path && strncmp(path, folder, strlen(folder)) == 0;
}
static void wait_for(int slow) {
  if (slow) usleep(DELAY_US);
}
static int is_slow_file(int descriptor) {
  char link[64], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  ssize_t size = readlink(link, path, sizeof path - 1);
  if (size < 0) return 0;
  path[size] = 0;
  return is_slow(path);
}
#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
static int mode_of(int flags, va_list more) { return flags & O_CREAT ? va_arg(more, int) : 0; }
#define OPEN(name)                             \
  int name(const char* path, int flags, ...) { \
    va_list more;                              \
    va_start(more, flags);                     \
    int mode = mode_of(flags, more);           \
    va_end(more);                              \
    wait_for(is_slow(path));                   \
    return NEXT(name)(path, flags, mode);      \
  }
OPEN(open)
OPEN(open64)
#define OPENAT(name)                                       \
  int name(int folder, const char* path, int flags, ...) { \
    va_list more;                                          \
    va_start(more, flags);                                 \
    int mode = mode_of(flags, more);                       \
    va_end(more);                                          \
    wait_for(is_slow(path));                               \
    return NEXT(name)(folder, path, flags, mode);          \
  }
    OPENAT(openat) OPENAT(openat64) int rename(const char* from, const char* to) {
  wait_for(is_slow(to));
  return NEXT(rename)(from, to);
}
int unlink(const char* path) {
  wait_for(is_slow(path));
  return NEXT(unlink)(path);
}
int fsync(int file) {
  wait_for(is_slow_file(file));
  return NEXT(fsync)(file);
}
ssize_t read(int file, void* to, size_t size) {
  wait_for(file > 2 && is_slow_file(file));
  return NEXT(read)(file, to, size);
}
ssize_t write(int file, const void* from, size_t size) {
  wait_for(file > 2 && is_slow_file(file));
  return NEXT(write)(file, from, size);
}
