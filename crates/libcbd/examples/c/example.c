/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * A disk behind a region: threads that write with calls, a queue that reads at depth, a drain.
 *
 *     cc -o example example.c $(pkg-config --cflags --libs cbd) -pthread
 *     truncate -s 64M disk && ./example region disk
 */
#include <cbd.h>
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BLOCK 4096
#define BLOCKS 2048
#define THREADS 4
#define DEPTH 32

static void check(int result, const char *doing)
{
    if (result < 0) {
        fprintf(stderr, "%s: %s (%s)\n", doing, cbd_last_error(), strerror(-result));
        exit(1);
    }
}

static void fill(unsigned char *block, unsigned number)
{
    for (size_t place = 0; place < BLOCK; place++)
        block[place] = (unsigned char)(number * 31 + place * 7);
}

struct work {
    cbd_device *device;
    unsigned first;
};

/* A call returns when its write is durable. Any number of threads may make calls. */
static void *write_blocks(void *argument)
{
    const struct work *work = argument;
    unsigned char block[BLOCK];

    for (unsigned number = work->first; number < BLOCKS; number += THREADS) {
        fill(block, number);
        check(cbd_write(work->device, block, BLOCK, (uint64_t)number * BLOCK, 0), "writing");
    }
    return NULL;
}

/* A queue is used by one thread, and accepts many requests at a time. */
static void read_blocks(cbd_device *device)
{
    static unsigned char buffers[DEPTH][BLOCK];
    unsigned number_of[DEPTH], free_places[DEPTH];
    unsigned free_count = DEPTH, next = 0, completed = 0;
    unsigned char expected[BLOCK];
    cbd_completion done[DEPTH];
    cbd_queue *queue;

    check(cbd_queue_open(device, &queue), "opening a queue");
    for (unsigned place = 0; place < DEPTH; place++)
        free_places[place] = place;
    while (completed < BLOCKS) {
        while (free_count > 0 && next < BLOCKS) {
            unsigned place = free_places[--free_count];
            number_of[place] = next;
            check(cbd_queue_read(queue, buffers[place], BLOCK, (uint64_t)next * BLOCK, place), "submitting");
            next++;
        }
        int count = cbd_queue_wait(queue, done, DEPTH, 1, -1);
        check(count, "waiting");
        for (int one = 0; one < count; one++) {
            unsigned place = (unsigned)done[one].user_data;
            check(done[one].result, "reading");
            fill(expected, number_of[place]);
            if (memcmp(buffers[place], expected, BLOCK) != 0) {
                fprintf(stderr, "block %u differs from the written data\n", number_of[place]);
                exit(1);
            }
            free_places[free_count++] = place;
            completed++;
        }
    }
    check(cbd_queue_close(queue), "closing the queue");
}

int main(int argc, char **argv)
{
    cbd_region_options region_options = {0};
    cbd_device_options device_options = {0};
    pthread_t threads[THREADS];
    struct work work[THREADS];
    cbd_region *region;
    cbd_device *device;
    cbd_geometry geometry;
    cbd_status status;
    cbd_verify_request verify = {0};
    cbd_verified verified;
    cbd_finding findings[8];
    char warnings[1024];

    if (argc != 3) {
        fprintf(stderr, "usage: %s REGION DISK\n", argv[0]);
        return 2;
    }

    /* Opens the region if it exists, else formats one. */
    int opened = cbd_region_open(argv[1], NULL, &region);
    if (opened == -ENOENT) {
        region_options.flags = CBD_REGION_FORMAT;
        region_options.size = 64 << 20;
        opened = cbd_region_open(argv[1], &region_options, &region);
    }
    check(opened, "opening the region");
    check(cbd_region_warnings(region, warnings, sizeof warnings), "querying the warnings");
    if (warnings[0] != '\0')
        printf("note: %s\n", warnings);

    check(cbd_device_attach(region, argv[2], &device_options, &device), "attaching the disk");
    check(cbd_device_geometry(device, &geometry), "querying the geometry");
    printf("%s: %" PRIu64 " bytes, sectors of %" PRIu32 ", writes of up to %" PRIu32 " bytes are atomic\n", argv[2],
           geometry.size, geometry.sector, geometry.atomic_unit);

    for (unsigned thread = 0; thread < THREADS; thread++) {
        work[thread] = (struct work){.device = device, .first = thread};
        if (pthread_create(&threads[thread], NULL, write_blocks, &work[thread]) != 0) {
            fprintf(stderr, "no thread\n");
            return 1;
        }
    }
    for (unsigned thread = 0; thread < THREADS; thread++)
        pthread_join(threads[thread], NULL);

    read_blocks(device);

    check(cbd_device_status(device, &status), "querying the status");
    printf("%" PRIu64 " bytes written, %" PRIu64 " read from the cache\n", status.written_bytes,
           status.read_hit_bytes);

    /* Both copies of everything, and whether they agree. */
    verify.length = geometry.size;
    verify.level = CBD_VERIFY_AGREE;
    verify.findings = findings;
    verify.capacity = sizeof findings / sizeof findings[0];
    check(cbd_verify(device, &verify, &verified), "verifying the device");
    for (size_t one = 0; one < verify.capacity && one < verified.findings; one++)
        printf("bytes from %" PRIu64 ", %" PRIu64 " in all: flaw %" PRIu32 "\n", findings[one].offset,
               findings[one].length, findings[one].flaw);
    if (verified.cache_bytes == 0 || verified.findings != 0)
        return 1;

    /* The disk is a plain disk again. To keep the cache instead: cbd_device_close. */
    check(cbd_device_detach(&device, 0), "detaching the disk");
    check(cbd_region_close(region), "closing the region");
    puts("all data is on the disk");
    return 0;
}
