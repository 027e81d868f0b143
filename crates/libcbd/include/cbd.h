/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * libcbd: persistent memory in front of a disk, in a program of your own.
 *
 * Open a region, attach a disk, read and write. A write is durable in the region when the call returns, and reaches the disk in
 * the background. A region has one owner: no daemon serves it meanwhile. docs/libcbd.md says more.
 *
 * Every function returns 0, or a count, or a negative errno; cbd_last_error() then has the words. A structure of zeroes stands for
 * the defaults. Regions and devices may be used by any number of threads at once, a queue by one at a time. Offsets and lengths are
 * bytes, whole sectors of the device. A child of fork() must not use any handle.
 */

#ifndef CBD_H
#define CBD_H

/* Made from crates/libcbd/src/c by a test; do not edit. */

#include <stddef.h>
#include <stdint.h>

/*
 Without a cache: all goes to the disk.
 */
#define CBD_DEVICE_NO_CACHE 1

/*
 Data is not under a checksum; for a new cache only.
 */
#define CBD_DEVICE_NO_DATA_CRC 2

/*
 As it is, or strict for a new cache.
 */
#define CBD_CONSISTENCY_DEFAULT 0

/*
 Epoch by epoch: alone, the disk is a legal crash state at any moment.
 */
#define CBD_CONSISTENCY_STRICT 1

/*
 Many epochs in one batch: legal between batches.
 */
#define CBD_CONSISTENCY_CHECKPOINT 2

/*
 By address, at once: no promise until all is drained.
 */
#define CBD_CONSISTENCY_NONE 3

/*
 Nothing later reaches the disk that has refused a write for long.
 */
#define CBD_ON_WRITE_ERROR_STOP 0

/*
 What the disk refuses is kept in the cache, and everything else goes on.
 */
#define CBD_ON_WRITE_ERROR_PARK 1

/*
 Nothing that is written later reaches the disk before this.
 */
#define CBD_FUA 1

/*
 The device has a cache.
 */
#define CBD_STATUS_CACHED 1

/*
 The disk alone is a state that a plain disk could have shown after a power cut.
 */
#define CBD_STATUS_DISK_IS_CONSISTENT 2

/*
 The disk fails at present.
 */
#define CBD_STATUS_DISK_FAILS 4

/*
 Writes that find no space fail, because the disk has refused writes for long.
 */
#define CBD_STATUS_STALLED 8

/*
 A request waits for space.
 */
#define CBD_STATUS_WRITERS_WAIT 16

/*
 Make a new transport of the region; what it held is lost.
 */
#define CBD_REGION_FORMAT 1

/*
 With `CBD_REGION_FORMAT`: even if it holds a transport or other data.
 */
#define CBD_REGION_FORCE 2

/*
 Refuse a region that does not survive a power failure.
 */
#define CBD_REGION_REQUIRE_PERSISTENT 4

/*
 A disk behind its cache, open in this process. It may be used by any number of threads.
 */
typedef struct cbd_device cbd_device;

/*
 A queue of a device. It may move between threads, and is used by one at a time.
 */
typedef struct cbd_queue cbd_queue;

/*
 An open region. It may be used by any number of threads.
 */
typedef struct cbd_region cbd_region;

/*
 How a disk is brought onto a region. All zeroes: a new disk gets a cache of all that is free, one that is there is taken up
 as it is.
 */
typedef struct cbd_device_options {
  /*
   Bytes of its cache. 0: all that is free, or as it is.
   */
  uint64_t cache_size;
  /*
   `CBD_CONSISTENCY_..`.
   */
  uint32_t consistency;
  /*
   `CBD_DEVICE_..`.
   */
  uint32_t flags;
  /*
   0.
   */
  uint64_t reserved[6];
} cbd_device_options;

/*
 What a device is.
 */
typedef struct cbd_geometry {
  /*
   Bytes.
   */
  uint64_t size;
  /*
   Every request is whole sectors of so many bytes.
   */
  uint32_t sector;
  /*
   What is best not to write in part, in bytes.
   */
  uint32_t physical_sector;
  /*
   A write of at most so many bytes inside 4 MiB of the device is recovered whole or not at all.
   */
  uint32_t atomic_unit;
  /*
   Granularity of discards in bytes; 0 where discards give nothing back.
   */
  uint32_t discard_granularity;
  /*
   Row of the backend on its region.
   */
  uint32_t backend_id;
  /*
   0.
   */
  uint32_t reserved0;
  /*
   0.
   */
  uint64_t reserved[4];
} cbd_geometry;

/*
 What can be changed while a cache runs.
 */
typedef struct cbd_settings {
  /*
   Reclaim begins when more than this share of the segments is used; 0 to 90.
   */
  uint32_t gc_percent;
  /*
   `CBD_CONSISTENCY_..`, not the default.
   */
  uint32_t consistency;
  /*
   Limit of writeback in bytes a second; 0: as fast as it is needed.
   */
  uint64_t writeback_rate;
  /*
   Writeback goes at full speed when more than this share of the cache is dirty; 0 to 90.
   */
  uint32_t dirty_target_percent;
  /*
   `CBD_ON_WRITE_ERROR_..`.
   */
  uint32_t on_write_error;
  /*
   Seconds of failed attempts after which `on_write_error` has effect; 0 to 86400.
   */
  uint32_t write_error_after_s;
  /*
   0.
   */
  uint32_t reserved0;
  /*
   0.
   */
  uint64_t reserved[4];
} cbd_settings;

/*
 Counters since the device was opened, and its state now.
 */
typedef struct cbd_status {
  /*
   `CBD_STATUS_..`.
   */
  uint32_t flags;
  /*
   Segments of the cache.
   */
  uint32_t segments;
  /*
   Free ones.
   */
  uint32_t free_segments;
  /*
   Ranges that read with an error.
   */
  uint32_t damaged_ranges;
  /*
   Bytes that the disk does not have yet, overwritten versions included.
   */
  uint64_t dirty_bytes;
  /*
   Bytes that were written.
   */
  uint64_t written_bytes;
  /*
   Bytes that reads found in the cache.
   */
  uint64_t read_hit_bytes;
  /*
   Bytes that reads had to take from the disk.
   */
  uint64_t read_missed_bytes;
  /*
   Bytes written to the disk.
   */
  uint64_t written_back_bytes;
  /*
   Bytes that the disk refuses.
   */
  uint64_t parked_bytes;
  /*
   The present epoch.
   */
  uint64_t epoch;
  /*
   Everything up to this epoch is durable on the disk.
   */
  uint64_t drained_epoch;
  /*
   Every write that completed and was flushed before this time is on the disk; milliseconds since 1970 UTC, 0: not known.
   */
  uint64_t drained_unix_ms;
  /*
   0.
   */
  uint64_t reserved[8];
} cbd_status;

/*
 How a request ended.
 */
typedef struct cbd_completion {
  /*
   What the request was given.
   */
  uint64_t user_data;
  /*
   0 or a negative errno. The words for the last one that failed are in `cbd_last_error`.
   */
  int32_t result;
  /*
   0.
   */
  uint32_t reserved;
} cbd_completion;

/*
 How a region is opened. All zeroes: as it is.
 */
typedef struct cbd_region_options {
  /*
   How large it has to be at least, in bytes; a file that is made gets this size. 0: as it is.
   */
  uint64_t size;
  /*
   With `CBD_REGION_FORMAT`: bytes of a segment, a power of two. 0: chosen by the region's size.
   */
  uint64_t segment_size;
  /*
   The host to act as; give a daemon that is to serve the same backends later the same name. NULL: the one that the
   region has, or the machine's name if it has none.
   */
  const char *host;
  /*
   `CBD_REGION_..`.
   */
  uint32_t flags;
  /*
   0.
   */
  uint32_t reserved0;
  /*
   0.
   */
  uint64_t reserved[4];
} cbd_region_options;

/*
 What a region is.
 */
typedef struct cbd_region_info {
  /*
   Bytes of the mapping.
   */
  uint64_t size;
  /*
   Bytes of a segment.
   */
  uint64_t segment_size;
  /*
   Bytes that a new cache can have.
   */
  uint64_t free_bytes;
  /*
   Row of the host as which this process acts.
   */
  uint32_t host_id;
  /*
   1 if a completed write survives a power failure; 0 if only the death of the process.
   */
  uint32_t power_fail;
  /*
   The transport's identity, as text.
   */
  char uuid[40];
  /*
   Name of the host as which this process acts.
   */
  char host[64];
  /*
   0.
   */
  uint64_t reserved[8];
} cbd_region_info;

/*
 A disk that is recorded on a region.
 */
typedef struct cbd_backend_info {
  /*
   Its row: what `cbd_device_open` takes.
   */
  uint32_t id;
  /*
   Row of the host that it belongs to.
   */
  uint32_t host_id;
  /*
   Bytes.
   */
  uint64_t size;
  /*
   Bytes of its cache; 0 without one.
   */
  uint64_t cache_size;
  /*
   Bytes of a sector.
   */
  uint32_t sector;
  /*
   1 if data is under a checksum.
   */
  uint32_t data_crc;
  /*
   The path of the disk, as it was found last.
   */
  char path[1024];
  /*
   0.
   */
  uint64_t reserved[8];
} cbd_backend_info;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/*
 The version of the library, as text: "0.1.0".
 */
const char *cbd_version(void);

/*
 What went wrong in the last call of this thread that failed: which object, and what to do about it. It is valid until
 the next call of this thread that fails, and empty before the first.
 */
const char *cbd_last_error(void);

/*
 Brings the disk at `path` onto the region, or takes up what the region has of it, whoever left it there. `options` may be
 NULL.

 # Safety
 `region` is open or NULL; `path` is text or NULL; `options` leads to options or is NULL; `device` can be written or is NULL.
 */
int cbd_device_attach(const struct cbd_region *region,
                      const char *path,
                      const struct cbd_device_options *options,
                      struct cbd_device **device);

/*
 Takes up the backend `id` of the region, its disk where it was recorded.

 # Safety
 `region` is open or NULL; `device` can be written or is NULL.
 */
int cbd_device_open(const struct cbd_region *region, uint32_t id, struct cbd_device **device);

/*
 Ends the device: what is dirty stays in the region, marked, for whoever opens it next. -EBUSY while queues of it are
 open; the handle is valid still then. -EIO: the region's memory fails; the handle is gone. NULL is nothing to close.

 # Safety
 `device` is open or NULL, and nobody else uses it.
 */
int cbd_device_close(struct cbd_device *device);

/*
 Drains the device, ends it, and takes the disk off the region: it is a plain disk again, with all its data. Gives up after
 `patience_s` seconds without progress (0: 60). When it fails, `*device` is NULL if the device is gone, and else as it was.

 # Safety
 `device` leads to an open device, or to NULL, or is NULL; nobody else uses the device.
 */
int cbd_device_detach(struct cbd_device **device,
                      uint32_t patience_s);

/*
 Brings everything that was written before to the disk. Gives up after `patience_s` seconds without progress (0: 60): what
 is dirty stays in the region then.

 # Safety
 `device` is open or NULL.
 */
int cbd_device_drain(const struct cbd_device *device,
                     uint32_t patience_s);

/*
 What the device is.

 # Safety
 `device` is open or NULL; `geometry` can be written or is NULL.
 */
int cbd_device_geometry(const struct cbd_device *device, struct cbd_geometry *geometry);

/*
 The settings in force.

 # Safety
 `device` is open or NULL; `settings` can be written or is NULL.
 */
int cbd_device_settings(const struct cbd_device *device, struct cbd_settings *settings);

/*
 Changes the settings, all of them, now and for whoever opens the region later. Ask for those in force first.

 # Safety
 `device` is open or NULL; `settings` leads to settings or is NULL.
 */
int cbd_device_set_settings(const struct cbd_device *device, const struct cbd_settings *settings);

/*
 Counters since the device was opened, and its state now. Without a cache all of it is 0.

 # Safety
 `device` is open or NULL; `status` can be written or is NULL.
 */
int cbd_device_status(const struct cbd_device *device, struct cbd_status *status);

/*
 What the user should know of the device now, a line each, as `cbd_region_warnings`.

 # Safety
 `device` is open or NULL; `capacity` bytes at `buffer` can be written, or it is NULL.
 */
int cbd_device_warnings(const struct cbd_device *device, char *buffer, size_t capacity);

/*
 Fills `length` bytes at `buffer` from `offset`, in whole sectors. When it fails they mean nothing.

 # Safety
 `device` is open or NULL; `length` bytes at `buffer` can be written, or it is NULL.
 */
int cbd_read(const struct cbd_device *device, void *buffer, size_t length, uint64_t offset);

/*
 Writes `length` bytes at `data` to `offset`, in whole sectors. They are durable in the region when this returns 0. `flags`:
 0 or `CBD_FUA`.

 # Safety
 `device` is open or NULL; `length` bytes at `data` can be read, or it is NULL; nobody changes them meanwhile.
 */
int cbd_write(const struct cbd_device *device,
              const void *data,
              size_t length,
              uint64_t offset,
              uint32_t flags);

/*
 Nothing that is written after this reaches the disk before what was written before it. Durable it is without this.

 # Safety
 `device` is open or NULL.
 */
int cbd_flush(const struct cbd_device *device);

/*
 The range is not needed any more: it reads as zeroes from now on, and the disk gives its space back where it can.

 # Safety
 `device` is open or NULL.
 */
int cbd_discard(const struct cbd_device *device,
                uint64_t offset,
                uint64_t length);

/*
 The range reads as zeroes from now on. `flags`: 0 or `CBD_FUA`.

 # Safety
 `device` is open or NULL.
 */
int cbd_write_zeroes(const struct cbd_device *device, uint64_t offset, uint64_t length, uint32_t flags);

/*
 Opens a queue of the device; it keeps the device open.

 # Safety
 `device` is open or NULL; `queue` can be written or is NULL.
 */
int cbd_queue_open(const struct cbd_device *device, struct cbd_queue **queue);

/*
 Closes the queue. What is in flight is given up: such a write may or may not have happened, and the memory of such a read is
 the caller's again. NULL is nothing to close.

 # Safety
 `queue` is open or NULL, and nobody else uses it.
 */
int cbd_queue_close(struct cbd_queue *queue);

/*
 Submits a read of `length` bytes from `offset` to `buffer`, which is the queue's until the completion was given out.

 # Safety
 `queue` is open or NULL; `length` bytes at `buffer` can be written until then, or it is NULL.
 */
int cbd_queue_read(const struct cbd_queue *queue,
                   void *buffer,
                   size_t length,
                   uint64_t offset,
                   uint64_t user_data);

/*
 Submits a write of `length` bytes at `data` to `offset`. `data` is the caller's again when this returns. `flags`: 0 or
 `CBD_FUA`.

 # Safety
 `queue` is open or NULL; `length` bytes at `data` can be read, or it is NULL; nobody changes them meanwhile.
 */
int cbd_queue_write(const struct cbd_queue *queue,
                    const void *data,
                    size_t length,
                    uint64_t offset,
                    uint32_t flags,
                    uint64_t user_data);

/*
 Submits a flush. It covers what has completed before.

 # Safety
 `queue` is open or NULL.
 */
int cbd_queue_flush(const struct cbd_queue *queue, uint64_t user_data);

/*
 Submits a discard.

 # Safety
 `queue` is open or NULL.
 */
int cbd_queue_discard(const struct cbd_queue *queue, uint64_t offset, uint64_t length, uint64_t user_data);

/*
 Submits a write of zeroes. `flags`: 0 or `CBD_FUA`.

 # Safety
 `queue` is open or NULL.
 */
int cbd_queue_write_zeroes(const struct cbd_queue *queue,
                           uint64_t offset,
                           uint64_t length,
                           uint32_t flags,
                           uint64_t user_data);

/*
 Gives out what has completed: at most `capacity` completions are in `completions`, and how many is returned. Does not wait.

 # Safety
 `queue` is open or NULL; `capacity` elements at `completions` can be written, or it is NULL; the memory of reads is as it was
 promised.
 */
int cbd_queue_poll(const struct cbd_queue *queue,
                   struct cbd_completion *completions,
                   size_t capacity);

/*
 As `cbd_queue_poll`, but waits until at least `least` requests have completed, or all that are in flight, or `timeout_ms` have
 passed (-1: however long).

 # Safety
 As `cbd_queue_poll`.
 */
int cbd_queue_wait(const struct cbd_queue *queue,
                   struct cbd_completion *completions,
                   size_t capacity,
                   size_t least,
                   int64_t timeout_ms);

/*
 How many requests were submitted whose completion was not given out yet.

 # Safety
 `queue` is open or NULL.
 */
int cbd_queue_in_flight(const struct cbd_queue *queue);

/*
 Descriptors for a loop of the program's own: one of them is readable when `cbd_queue_poll` may have something. At most `capacity`
 of them are in `descriptors`, and how many there are is returned. They are the queue's: not to be read or closed. What was
 complete when it was submitted is not announced: poll once after submitting.

 # Safety
 `queue` is open or NULL; `capacity` elements at `descriptors` can be written, or it is NULL.
 */
int cbd_queue_descriptors(const struct cbd_queue *queue,
                          int *descriptors,
                          size_t capacity);

/*
 Opens, holds and maps the region at `path`, and formats it if that is asked for. `options` may be NULL.

 -EBUSY: somebody has it, and `cbd_last_error` says who. -ENOENT: there is none. -EEXIST: what is to be formatted holds
 something. -EIO: it is damaged, or no region.

 # Safety
 `path` is text or NULL; `options` leads to options or is NULL; `region` can be written or is NULL.
 */
int cbd_region_open(const char *path,
                    const struct cbd_region_options *options,
                    struct cbd_region **region);

/*
 Lets the region go. -EBUSY while devices or queues on it are open; the handle is valid still then. NULL is nothing to close.

 # Safety
 `region` came from `cbd_region_open` and was not closed, or is NULL; nobody else uses it.
 */
int cbd_region_close(struct cbd_region *region);

/*
 What the region is.

 # Safety
 `region` is open or NULL; `info` can be written or is NULL.
 */
int cbd_region_get_info(const struct cbd_region *region, struct cbd_region_info *info);

/*
 What the user should know of the region, a line each. As much as fits is in `buffer`, which ends with a zero byte; the length
 of all of it, without that byte, is returned.

 # Safety
 `region` is open or NULL; `capacity` bytes at `buffer` can be written, or it is NULL.
 */
int cbd_region_warnings(const struct cbd_region *region,
                        char *buffer,
                        size_t capacity);

/*
 The disks that are recorded on the region: at most `capacity` of them are in `backends`, and how many there are is returned.

 # Safety
 `region` is open or NULL; `capacity` elements at `backends` can be written, or it is NULL.
 */
int cbd_region_backends(const struct cbd_region *region,
                        struct cbd_backend_info *backends,
                        size_t capacity);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* CBD_H */
