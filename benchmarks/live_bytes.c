/* Counts the bytes of live CPU tensors of a process, from below torch: every block its allocator asks the C library for.

   The one idea: torch's CPU allocator takes memory by `posix_memalign` to 64 bytes and nothing else of it does, so
   preloaded functions of those names see every tensor and every temporary of an operator, on every thread, whichever
   framework made it. Sizes are those asked for. Blocks of other alignments are passed on uncounted. */

#include <errno.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

extern void *__libc_memalign(size_t alignment, size_t size);
extern void __libc_free(void *block);

#define ALIGNMENT 64
#define SLOTS (1u << 20)

/* An open hash table by address; what is removed leaves no gap in a chain (Knuth, volume 3, 6.4, algorithm R). */
static struct { void *block; size_t size; } table[SLOTS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static long long live, peak;

static unsigned slot_of(void *block) { return (unsigned)(((uintptr_t)block >> 6) * 2654435761u) & (SLOTS - 1); }

static void close_gap(unsigned gap) {
    for (unsigned slot = (gap + 1) & (SLOTS - 1); table[slot].block != NULL; slot = (slot + 1) & (SLOTS - 1)) {
        unsigned home = slot_of(table[slot].block);
        if (((slot - home) & (SLOTS - 1)) >= ((slot - gap) & (SLOTS - 1))) {
            table[gap] = table[slot];
            gap = slot;
        }
    }
    table[gap].block = NULL;
}

int posix_memalign(void **result, size_t alignment, size_t size) {
    void *block = __libc_memalign(alignment, size);
    if (block == NULL) return ENOMEM;
    *result = block;
    if (alignment != ALIGNMENT) return 0;
    pthread_mutex_lock(&lock);
    unsigned slot = slot_of(block);
    while (table[slot].block != NULL) slot = (slot + 1) & (SLOTS - 1);
    table[slot].block = block;
    table[slot].size = size;
    live += size;
    if (live > peak) peak = live;
    pthread_mutex_unlock(&lock);
    return 0;
}

void free(void *block) {
    if (block != NULL && ((uintptr_t)block & (ALIGNMENT - 1)) == 0) {
        pthread_mutex_lock(&lock);
        for (unsigned slot = slot_of(block); table[slot].block != NULL; slot = (slot + 1) & (SLOTS - 1)) {
            if (table[slot].block == block) {
                live -= table[slot].size;
                close_gap(slot);
                break;
            }
        }
        pthread_mutex_unlock(&lock);
    }
    __libc_free(block);
}

/* For the process itself, by ctypes. */
long long live_bytes(void) { return __atomic_load_n(&live, __ATOMIC_RELAXED); }
long long peak_live_bytes(void) { return __atomic_load_n(&peak, __ATOMIC_RELAXED); }
void forget_peak(void) {
    pthread_mutex_lock(&lock);
    peak = live;
    pthread_mutex_unlock(&lock);
}
