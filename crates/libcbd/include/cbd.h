/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * libcbd: persistent memory as a cache of a disk, as a library.
 *
 * Open a region, attach a disk, read and write. A write is durable in the region when the call returns, and
 * reaches the disk in the background. A region has one owner: no daemon serves it meanwhile. See docs/libcbd.md.
 *
 * Every function returns 0, or a count, or a negative errno; cbd_last_error() then has the text. A structure of
 * zeroes means the defaults. Any number of threads may use a region or a device at once; one thread at a time
 * may use a queue. Offsets and lengths are bytes, whole sectors of the device. A child of fork() must not use
 * any handle.
 */

#ifndef CBD_H
#define CBD_H

/* Generated from crates/libcbd/src/c by a test; do not edit. */

#include <stddef.h>
#include <stdint.h>

/*
 Without a cache: all requests go to the disk.
 */
#define CBD_DEVICE_NO_CACHE 1

/*
 No checksums of data; for a new cache only.
 */
#define CBD_DEVICE_NO_DATA_CRC 2

/*
 The present mode, or strict for a new cache.
 */
#define CBD_CONSISTENCY_DEFAULT 0

/*
 Epoch by epoch: without the region, the disk is a valid crash state at any moment.
 */
#define CBD_CONSISTENCY_STRICT 1

/*
 Many epochs in one batch: the disk is a valid crash state between batches.
 */
#define CBD_CONSISTENCY_CHECKPOINT 2

/*
 At once, in the order of addresses: the disk is consistent only when all data is drained.
 */
#define CBD_CONSISTENCY_NONE 3

/*
 No later data is written to a disk that has refused a write for a long time.
 */
#define CBD_ON_WRITE_ERROR_STOP 0

/*
 Blocks that the disk refuses stay in the cache, and everything else is written.
 */
#define CBD_ON_WRITE_ERROR_PARK 1

/*
 A FUA write: nothing that is written later reaches the disk before it.
 */
#define CBD_FUA 1

/*
 The device has a cache.
 */
#define CBD_STATUS_CACHED 1

/*
 The disk without the region is in a state that a plain disk could have after a power failure.
 */
#define CBD_STATUS_DISK_IS_CONSISTENT 2

/*
 The disk fails at this moment.
 */
#define CBD_STATUS_DISK_FAILS 4

/*
 Writes fail if the cache has no space, because the disk has refused writes for a long time.
 */
#define CBD_STATUS_STALLED 8

/*
 A request waits for space.
 */
#define CBD_STATUS_WRITERS_WAIT 16

/*
 Format the region with a new transport; its content is lost.
 */
#define CBD_REGION_FORMAT 1

/*
 With `CBD_REGION_FORMAT`: format even if the region holds a transport or other data.
 */
#define CBD_REGION_FORCE 2

/*
 Refuse a region that does not survive a power failure.
 */
#define CBD_REGION_REQUIRE_PERSISTENT 4

/*
 The newest data: what a read would return can be read, and has its checksum if the cache holds it.
 */
#define CBD_VERIFY_NEWEST 0

/*
 Each copy: also the one that the disk has of clean blocks can be read.
 */
#define CBD_VERIFY_ALL 1

/*
 Each copy, and whether the copies of clean blocks have the same content.
 */
#define CBD_VERIFY_AGREE 2

/*
 A copy on the disk that is lost is repaired from the one in the cache, by writeback. Copies in the cache are always repaired.
 */
#define CBD_VERIFY_REPAIR 1

/*
 The disk alone has the range, and cannot read it.
 */
#define CBD_FLAW_UNREADABLE 1

/*
 The copy of clean data in the cache is damaged; the disk has the data.
 */
#define CBD_FLAW_CACHE_DAMAGED 2

/*
 Dirty data, of which no other copy exists, is damaged.
 */
#define CBD_FLAW_DIRTY_DAMAGED 3

/*
 Clean data is damaged in the cache, and what the disk has is unreadable or different, too.
 */
#define CBD_FLAW_BOTH_DAMAGED 4

/*
 The disk cannot read clean data that the cache holds undamaged.
 */
#define CBD_FLAW_BACKING_UNREADABLE 5

/*
 The disk has other data than was written; the cache holds it undamaged.
 */
#define CBD_FLAW_BACKING_DIFFERS 6

/*
 The disk has other data than it had when the cache read it: another program has written to it.
 */
#define CBD_FLAW_BACKING_CHANGED 7

/*
 The range was quarantined before.
 */
#define CBD_FLAW_QUARANTINED 8

/*
 One of the two copies of a record was damaged. The range is that of its data.
 */
#define CBD_FLAW_RECORD_COPY 9

/*
 The copy in the cache is whole again, or writeback repairs the disk.
 */
#define CBD_FINDING_REPAIRED 1

/*
 Reads of the range fail until it is overwritten.
 */
#define CBD_FINDING_LOST 2

/*
 A disk behind its cache, open in this process. Any number of threads may use it.
 */
typedef struct cbd_device cbd_device;

/*
 A queue of a device. It may move between threads; one thread at a time may use it.
 */
typedef struct cbd_queue cbd_queue;

/*
 An open region. Any number of threads may use it.
 */
typedef struct cbd_region cbd_region;

/*
 The parameters with which a disk is attached to a region. All zeroes: a new disk gets a cache of all free space, an attached
 one is opened unchanged.
 */
typedef struct cbd_device_options {
  /*
   Bytes of its cache. 0: all free space, or the present size.
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
 The properties of a device.
 */
typedef struct cbd_geometry {
  /*
   Bytes.
   */
  uint64_t size;
  /*
   Every request is whole sectors of this many bytes.
   */
  uint32_t sector;
  /*
   The unit that is best not written in part, in bytes.
   */
  uint32_t physical_sector;
  /*
   A write of at most this many bytes inside 4 MiB of the device is recovered completely or not at all.
   */
  uint32_t atomic_unit;
  /*
   Granularity of discards in bytes; 0 where discards free no space.
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
 The settings that can be changed while a cache runs.
 */
typedef struct cbd_settings {
  /*
   Reclaim begins when more than this percentage of the segments is used; 0 to 98.
   */
  uint32_t gc_percent;
  /*
   `CBD_CONSISTENCY_..`, not the default.
   */
  uint32_t consistency;
  /*
   Limit of writeback in bytes per second, 32768 at least; 0: as fast as needed.
   */
  uint64_t writeback_rate;
  /*
   The percentage of the cache that is dirty while data is written; 0 to 90. 0: everything is written back at once.
   */
  uint32_t dirty_target_percent;
  /*
   `CBD_ON_WRITE_ERROR_..`.
   */
  uint32_t on_write_error;
  /*
   Seconds of failed attempts after which `on_write_error` takes effect; 0 to 86400.
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
 Counters since the device was opened, and its present state.
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
   Free segments.
   */
  uint32_t free_segments;
  /*
   Ranges whose reads fail.
   */
  uint32_t damaged_ranges;
  /*
   Bytes that the disk does not have yet, overwritten versions included.
   */
  uint64_t dirty_bytes;
  /*
   Bytes written.
   */
  uint64_t written_bytes;
  /*
   Bytes that reads found in the cache.
   */
  uint64_t read_hit_bytes;
  /*
   Bytes that reads took from the disk.
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
   Every write that completed and was flushed before this time is on the disk; milliseconds since 1970
   UTC, 0: not known.
   */
  uint64_t drained_unix_ms;
  /*
   0.
   */
  uint64_t reserved[8];
} cbd_status;

/*
 A range with a flaw.
 */
typedef struct cbd_finding {
  /*
   First byte.
   */
  uint64_t offset;
  /*
   Number of bytes.
   */
  uint64_t length;
  /*
   `CBD_FLAW_..`. Later versions may have more.
   */
  uint32_t flaw;
  /*
   `CBD_FINDING_..`.
   */
  uint32_t flags;
} cbd_finding;

/*
 What is to be verified.
 */
typedef struct cbd_verify_request {
  /*
   First byte.
   */
  uint64_t offset;
  /*
   Number of bytes.
   */
  uint64_t length;
  /*
   `CBD_VERIFY_NEWEST`, `CBD_VERIFY_ALL` or `CBD_VERIFY_AGREE`.
   */
  uint32_t level;
  /*
   0 or `CBD_VERIFY_REPAIR`.
   */
  uint32_t flags;
  /*
   Receives the first findings, in the order of the device. NULL if `capacity` is 0.
   */
  struct cbd_finding *findings;
  /*
   Number of findings for which there is room.
   */
  size_t capacity;
  /*
   0.
   */
  uint64_t reserved[4];
} cbd_verify_request;

/*
 The result of a verification.
 */
typedef struct cbd_verified {
  /*
   Bytes whose copy in the cache was checked.
   */
  uint64_t cache_bytes;
  /*
   Bytes that the disk read. What it was asked for twice counts twice.
   */
  uint64_t backing_bytes;
  /*
   Bytes that were written during the verification, so that nothing is said about their former copies.
   */
  uint64_t changed_bytes;
  /*
   Number of findings, also of those for which there was no room.
   */
  uint64_t findings;
  /*
   Number of findings in ranges whose reads fail.
   */
  uint64_t lost;
  /*
   0.
   */
  uint64_t reserved[3];
} cbd_verified;

/*
 The completion of a request.
 */
typedef struct cbd_completion {
  /*
   The value that the request was submitted with.
   */
  uint64_t user_data;
  /*
   0 or a negative errno. The text of the last failed one is in `cbd_last_error`.
   */
  int32_t result;
  /*
   0.
   */
  uint32_t reserved;
} cbd_completion;

/*
 The parameters with which a region is opened. All zeroes: an existing region, unchanged.
 */
typedef struct cbd_region_options {
  /*
   Its minimum size in bytes; a file that is created gets this size. 0: the present size.
   */
  uint64_t size;
  /*
   With `CBD_REGION_FORMAT`: bytes of a segment, a power of two. 0: derived from the region's size.
   */
  uint64_t segment_size;
  /*
   The host to act as; a daemon that will serve the same backends later needs the same name. NULL: the
   host of the region, or the machine's name if it has none.
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
 The properties of a region.
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
   Bytes that are free for new caches.
   */
  uint64_t free_bytes;
  /*
   Row of this process's host.
   */
  uint32_t host_id;
  /*
   1 if a completed write survives a power failure; 0 if it survives only the death of the process.
   */
  uint32_t power_fail;
  /*
   The transport's identity, as text.
   */
  char uuid[40];
  /*
   Name of this process's host.
   */
  char host[64];
  /*
   0.
   */
  uint64_t reserved[8];
} cbd_region_info;

/*
 A disk that is recorded in a region.
 */
typedef struct cbd_backend_info {
  /*
   Its row: the argument of `cbd_device_open`.
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
   1 if data has checksums.
   */
  uint32_t data_crc;
  /*
   The path of the disk, as it was last found.
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
 The error of the last failed call of this thread: the object, and the remedy. The text is valid until the next failed call of
 this thread, and empty before the first.
 */
const char *cbd_last_error(void);

/*
 Attaches the disk at `path` to the region. If the region already has a backend of this disk, the call opens it, whichever
 process created it. `options` may be NULL.

 # Safety
 `region` is open or NULL; `path` is text or NULL; `options` points to options or is NULL; `device` can be written or is NULL.
 */
int cbd_device_attach(const struct cbd_region *region,
                      const char *path,
                      const struct cbd_device_options *options,
                      struct cbd_device **device);

/*
 Opens the backend `id` of the region, with the disk at its recorded path.

 # Safety
 `region` is open or NULL; `device` can be written or is NULL.
 */
int cbd_device_open(const struct cbd_region *region, uint32_t id, struct cbd_device **device);

/*
 Closes the device: dirty data stays in the region, marked, for the next process that opens it. -EBUSY
 while queues of it are open; the handle stays valid then. -EIO: the region's memory fails; the handle is
 released. NULL is ignored.

 # Safety
 `device` is open or NULL, and no other thread uses it.
 */
int cbd_device_close(struct cbd_device *device);

/*
 Drains the device, closes it, and removes the disk from the region: it is a plain disk again, with all its data. Fails after
 `timeout_s` seconds without progress (0: 60). After a failure `*device` is NULL if the device is closed, and unchanged
 otherwise.

 # Safety
 `device` points to an open device, or to NULL, or is NULL; no other thread uses the device.
 */
int cbd_device_detach(struct cbd_device **device,
                      uint32_t timeout_s);

/*
 Writes all data that was written before the call to the disk. Fails after `timeout_s` seconds without progress (0: 60): the
 dirty data then stays in the region.

 # Safety
 `device` is open or NULL.
 */
int cbd_device_drain(const struct cbd_device *device,
                     uint32_t timeout_s);

/*
 Uses a disk that has become larger to its present end, and stores the size in bytes, which is the same as before if the disk has
 not become larger. cbd_device_geometry shows it. Other threads may use the device meanwhile. EINVAL: the disk has shrunk, and
 nothing has changed.

 # Safety
 `device` is open or NULL; `size` can be written or is NULL.
 */
int cbd_device_grow(const struct cbd_device *device,
                    uint64_t *size);

/*
 The properties of the device.

 # Safety
 `device` is open or NULL; `geometry` can be written or is NULL.
 */
int cbd_device_geometry(const struct cbd_device *device, struct cbd_geometry *geometry);

/*
 The present settings.

 # Safety
 `device` is open or NULL; `settings` can be written or is NULL.
 */
int cbd_device_settings(const struct cbd_device *device, struct cbd_settings *settings);

/*
 Replaces the settings of the structure, for this process and for later openers of the region. Query the present ones first.

 # Safety
 `device` is open or NULL; `settings` points to settings or is NULL.
 */
int cbd_device_set_settings(const struct cbd_device *device,
                            const struct cbd_settings *settings);

/*
 Counters since the device was opened, and its present state. Without a cache all fields are 0.

 # Safety
 `device` is open or NULL; `status` can be written or is NULL.
 */
int cbd_device_status(const struct cbd_device *device, struct cbd_status *status);

/*
 The present warnings of the device, one per line, as `cbd_region_warnings`.

 # Safety
 `device` is open or NULL; `capacity` bytes at `buffer` can be written, or it is NULL.
 */
int cbd_device_warnings(const struct cbd_device *device, char *buffer, size_t capacity);

/*
 Reads `length` bytes from `offset` into `buffer`, in whole sectors. After a failure the content of the
 buffer is undefined.

 # Safety
 `device` is open or NULL; `length` bytes at `buffer` can be written, or it is NULL.
 */
int cbd_read(const struct cbd_device *device, void *buffer, size_t length, uint64_t offset);

/*
 Writes `length` bytes at `data` to `offset`, in whole sectors. They are durable in the region when the call returns 0.
 `flags`: 0 or `CBD_FUA`.

 # Safety
 `device` is open or NULL; `length` bytes at `data` can be read, or it is NULL; no thread changes them during the call.
 */
int cbd_write(const struct cbd_device *device,
              const void *data,
              size_t length,
              uint64_t offset,
              uint32_t flags);

/*
 A write barrier: nothing written after this reaches the disk before the earlier writes. Writes are durable
 without it.

 # Safety
 `device` is open or NULL.
 */
int cbd_flush(const struct cbd_device *device);

/*
 Discards the range: it reads as zeroes from now on, and the disk frees its space where it can.

 # Safety
 `device` is open or NULL.
 */
int cbd_discard(const struct cbd_device *device, uint64_t offset, uint64_t length);

/*
 Zeroes the range. `flags`: 0 or `CBD_FUA`.

 # Safety
 `device` is open or NULL.
 */
int cbd_write_zeroes(const struct cbd_device *device, uint64_t offset, uint64_t length, uint32_t flags);

/*
 Opens a queue of the device; the queue keeps the device open.

 # Safety
 `device` is open or NULL; `queue` can be written or is NULL.
 */
int cbd_queue_open(const struct cbd_device *device, struct cbd_queue **queue);

/*
 Closes the queue and cancels the requests in flight: such a write may or may not have happened, and the
 buffer of such a read belongs to the caller again. NULL is ignored.

 # Safety
 `queue` is open or NULL, and no other thread uses it.
 */
int cbd_queue_close(struct cbd_queue *queue);

/*
 Submits a read of `length` bytes from `offset` to `buffer`, which the caller must not use until the
 completion was returned.

 # Safety
 `queue` is open or NULL; `length` bytes at `buffer` can be written until then, or it is NULL.
 */
int cbd_queue_read(const struct cbd_queue *queue,
                   void *buffer,
                   size_t length,
                   uint64_t offset,
                   uint64_t user_data);

/*
 Submits a write of `length` bytes at `data` to `offset`. The caller may reuse `data` when this returns.
 `flags`: 0 or `CBD_FUA`.

 # Safety
 `queue` is open or NULL; `length` bytes at `data` can be read, or it is NULL; no thread changes them
 meanwhile.
 */
int cbd_queue_write(const struct cbd_queue *queue,
                    const void *data,
                    size_t length,
                    uint64_t offset,
                    uint32_t flags,
                    uint64_t user_data);

/*
 Submits a flush. It covers the writes that completed before.

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
 Submits a verification as `cbd_verify`, of 4 MiB at most. It yields to the other requests of the queue. `result` and
 `request->findings` are written when the completion is returned, and belong to the queue until then; `request` itself may be
 reused when this returns.

 # Safety
 `queue` is open or NULL; `request` can be read or is NULL; until the completion was returned `result` can be written or is
 NULL, and `request->capacity` elements at `request->findings` can be written.
 */
int cbd_queue_verify(const struct cbd_queue *queue,
                     const struct cbd_verify_request *request,
                     struct cbd_verified *result,
                     uint64_t user_data);

/*
 Returns completions: at most `capacity` of them in `completions`; the result is their number. Does not
 block.

 # Safety
 `queue` is open or NULL; `capacity` elements at `completions` can be written, or it is NULL; the buffers
 of reads and the destinations of verifications are valid.
 */
int cbd_queue_poll(const struct cbd_queue *queue, struct cbd_completion *completions, size_t capacity);

/*
 As `cbd_queue_poll`, but waits until at least `least` requests have completed, or all that are in flight,
 or until `timeout_ms` have passed (-1: no timeout).

 # Safety
 As `cbd_queue_poll`.
 */
int cbd_queue_wait(const struct cbd_queue *queue,
                   struct cbd_completion *completions,
                   size_t capacity,
                   size_t least,
                   int64_t timeout_ms);

/*
 The number of submitted requests whose completion was not returned yet.

 # Safety
 `queue` is open or NULL.
 */
int cbd_queue_in_flight(const struct cbd_queue *queue);

/*
 Descriptors for the program's own event loop: one of them is readable when `cbd_queue_poll` may have
 completions. At most `capacity` of them are in `descriptors`; the result is their total number. They
 belong to the queue: do not read or close them. A request that completes at its submission is not
 signalled: poll once after submitting.

 # Safety
 `queue` is open or NULL; `capacity` elements at `descriptors` can be written, or it is NULL.
 */
int cbd_queue_descriptors(const struct cbd_queue *queue, int *descriptors, size_t capacity);

/*
 Opens, locks and maps the region at `path`, and formats it on request. `options` may be NULL.

 -EBUSY: another process has the region open; `cbd_last_error` names that process. -ENOENT: the region does not exist. -EEXIST:
 the region to be formatted holds data. -EIO: the region is damaged, or the file is not a region.

 # Safety
 `path` is text or NULL; `options` points to options or is NULL; `region` can be written or is NULL.
 */
int cbd_region_open(const char *path,
                    const struct cbd_region_options *options,
                    struct cbd_region **region);

/*
 Closes the region. -EBUSY while devices or queues on it are open; the handle stays valid then. NULL is
 ignored.

 # Safety
 `region` came from `cbd_region_open` and was not closed, or is NULL; no other thread uses it.
 */
int cbd_region_close(struct cbd_region *region);

/*
 The properties of the region.

 # Safety
 `region` is open or NULL; `info` can be written or is NULL.
 */
int cbd_region_get_info(const struct cbd_region *region, struct cbd_region_info *info);

/*
 The warnings of the region, one per line. `buffer` receives as much as fits, and ends with a zero byte. The result is the
 length of the whole text, without that byte.

 # Safety
 `region` is open or NULL; `capacity` bytes at `buffer` can be written, or it is NULL.
 */
int cbd_region_warnings(const struct cbd_region *region,
                        char *buffer,
                        size_t capacity);

/*
 The disks that are recorded in the region: at most `capacity` of them in `backends`; the result is their
 total number.

 # Safety
 `region` is open or NULL; `capacity` elements at `backends` can be written, or it is NULL.
 */
int cbd_region_backends(const struct cbd_region *region, struct cbd_backend_info *backends, size_t capacity);

/*
 Verifies a range and waits for it, in whole sectors: the copies in the cache by their checksums, the rest by reading the disk.
 The result has the number of all findings; the first of them are in `request->findings`. What is wrong with the data is no
 error. After a failure the result is that of the part before it.

 # Safety
 `device` is open or NULL; `request` can be read, and `result` written, or they are NULL; `request->capacity` elements at
 `request->findings` can be written.
 */
int cbd_verify(const struct cbd_device *device,
               const struct cbd_verify_request *request,
               struct cbd_verified *result);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* CBD_H */
