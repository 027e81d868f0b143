/* SPDX-License-Identifier: GPL-2.0-only
 *
 * fio's engine for libcbd: a disk behind a region, in fio's own process.
 *
 * This file includes fio's headers and is, like fio, under version 2 of the GNU General Public License. libcbd,
 * which it is linked with, is not: it is available under the MIT license, which is compatible with that.
 *
 * The jobs are threads (thread=1): a region has one owner, so all jobs of a fio process share it. `filename` is
 * the disk. Each thread has its own cbd_queue, with the depth of the job.
 */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "fio.h"
#include "optgroup.h"

#include <cbd.h>

struct options {
	void *pad; /* fio takes an option at offset 0 for none */
	char *region;
	unsigned long long region_size;
	unsigned long long cache_size;
	unsigned int drain;
};

static struct fio_option options[] = {
	{
		.name = "region",
		.lname = "CBD region",
		.type = FIO_OPT_STR_STORE,
		.off1 = offsetof(struct options, region),
		.help = "The region of persistent memory: a file or a devdax device",
		.category = FIO_OPT_C_ENGINE,
		.group = FIO_OPT_G_INVALID,
	},
	{
		.name = "region_size",
		.lname = "CBD region size",
		.type = FIO_OPT_STR_VAL,
		.off1 = offsetof(struct options, region_size),
		.help = "Create the region with this size if it does not exist",
		.category = FIO_OPT_C_ENGINE,
		.group = FIO_OPT_G_INVALID,
	},
	{
		.name = "cache_size",
		.lname = "CBD cache size",
		.type = FIO_OPT_STR_VAL,
		.off1 = offsetof(struct options, cache_size),
		.help = "Size of the cache of a disk that has none yet (default: all free space)",
		.category = FIO_OPT_C_ENGINE,
		.group = FIO_OPT_G_INVALID,
	},
	{
		.name = "drain",
		.lname = "CBD drain",
		.type = FIO_OPT_BOOL,
		.off1 = offsetof(struct options, drain),
		.def = "0",
		.help = "Drain the cache to the disk when the last job ends",
		.category = FIO_OPT_C_ENGINE,
		.group = FIO_OPT_G_INVALID,
	},
	{ .name = NULL },
};

/* A region that this process has open. */
struct open_region {
	struct open_region *next;
	char *path;
	cbd_region *region;
	unsigned int users;
};

struct open_device {
	struct open_device *next;
	char *path;
	cbd_device *device;
	struct open_region *region;
	unsigned int users;
	bool drain;
};

/* The state of a job. */
struct job {
	struct open_device *device;
	cbd_queue *queue;
	cbd_completion *ready; /* completed, and not reported to fio yet */
	unsigned int ready_count;
	cbd_completion *events; /* the result of getevents */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct open_region *regions;
static struct open_device *devices;

static int complain(const char *doing, int error)
{
	log_err("cbd: %s: %s\n", doing, cbd_last_error());
	return -error;
}

static struct open_region *get_region(const struct options *wanted)
{
	cbd_region_options making = { .size = wanted->region_size, .flags = CBD_REGION_FORMAT };
	struct open_region *known;
	int error;

	for (known = regions; known; known = known->next) {
		if (!strcmp(known->path, wanted->region)) {
			known->users++;
			return known;
		}
	}
	known = calloc(1, sizeof(*known));
	if (!known)
		return NULL;
	error = cbd_region_open(wanted->region, NULL, &known->region);
	if (error == -ENOENT && wanted->region_size)
		error = cbd_region_open(wanted->region, &making, &known->region);
	if (error) {
		complain(wanted->region, error);
		free(known);
		return NULL;
	}
	known->path = strdup(wanted->region);
	known->users = 1;
	known->next = regions;
	regions = known;
	return known;
}

static void put_region(struct open_region *region)
{
	struct open_region **place = &regions;
	int error;

	if (--region->users)
		return;
	while (*place != region)
		place = &(*place)->next;
	*place = region->next;
	error = cbd_region_close(region->region);
	if (error)
		complain(region->path, error);
	free(region->path);
	free(region);
}

static struct open_device *get_device(const struct options *wanted, const char *disk)
{
	cbd_device_options making = { .cache_size = wanted->cache_size };
	struct open_device *known;
	int error;

	for (known = devices; known; known = known->next) {
		if (!strcmp(known->path, disk) && !strcmp(known->region->path, wanted->region)) {
			known->users++;
			known->drain |= wanted->drain;
			return known;
		}
	}
	known = calloc(1, sizeof(*known));
	if (!known)
		return NULL;
	known->region = get_region(wanted);
	if (!known->region) {
		free(known);
		return NULL;
	}
	error = cbd_device_attach(known->region->region, disk, &making, &known->device);
	if (error) {
		complain(disk, error);
		put_region(known->region);
		free(known);
		return NULL;
	}
	known->path = strdup(disk);
	known->drain = wanted->drain;
	known->users = 1;
	known->next = devices;
	devices = known;
	return known;
}

static void put_device(struct open_device *device)
{
	struct open_device **place = &devices;
	int error;

	if (--device->users)
		return;
	while (*place != device)
		place = &(*place)->next;
	*place = device->next;
	if (device->drain) {
		error = cbd_device_drain(device->device, 0);
		if (error)
			complain(device->path, error);
	}
	error = cbd_device_close(device->device);
	if (error)
		complain(device->path, error);
	put_region(device->region);
	free(device->path);
	free(device);
}

/* In fio's main thread, once for each job, before any of them runs. */
static int engine_setup(struct thread_data *td)
{
	const struct options *wanted = td->eo;
	cbd_geometry geometry;
	struct fio_file *file;
	struct job *job;
	int error;

	if (!td->o.use_thread) {
		log_err("cbd: a region has one owner, so jobs are threads here: set thread=1\n");
		return 1;
	}
	if (!wanted->region) {
		log_err("cbd: the region is missing: set region=PATH\n");
		return 1;
	}
	if (td->o.nr_files != 1) {
		log_err("cbd: a job has one disk here: filename=PATH\n");
		return 1;
	}
	file = td->files[0];
	job = calloc(1, sizeof(*job));
	if (!job)
		return 1;
	job->ready = calloc(td->o.iodepth, sizeof(*job->ready));
	job->events = calloc(td->o.iodepth, sizeof(*job->events));
	pthread_mutex_lock(&lock);
	job->device = job->ready && job->events ? get_device(wanted, file->file_name) : NULL;
	error = job->device ? cbd_device_geometry(job->device->device, &geometry) : -ENODEV;
	pthread_mutex_unlock(&lock);
	td->io_ops_data = job;
	if (error)
		return 1;
	file->filetype = FIO_TYPE_BLOCK;
	file->real_file_size = geometry.size;
	fio_file_set_size_known(file);
	return 0;
}

/* In the job's own thread. */
static int engine_init(struct thread_data *td)
{
	struct job *job = td->io_ops_data;
	int error = cbd_queue_open(job->device->device, &job->queue);

	return error ? complain("a queue", error) : 0;
}

static void engine_cleanup(struct thread_data *td)
{
	struct job *job = td->io_ops_data;

	if (!job)
		return;
	td->io_ops_data = NULL;
	cbd_queue_close(job->queue);
	pthread_mutex_lock(&lock);
	if (job->device)
		put_device(job->device);
	pthread_mutex_unlock(&lock);
	free(job->ready);
	free(job->events);
	free(job);
}

/*
 * A request that the cache can serve at once is complete at its submission. This is reported to fio immediately,
 * otherwise fio would measure the time until its next getevents. Negative: the queue failed.
 */
static int is_complete(struct thread_data *td, struct job *job, uint64_t data)
{
	unsigned int room = td->o.iodepth - job->ready_count, last;
	int count = cbd_queue_poll(job->queue, job->ready + job->ready_count, room);

	if (count < 0)
		return count;
	job->ready_count += count;
	for (unsigned int place = 0; place < job->ready_count; place++) {
		if (job->ready[place].user_data != data)
			continue;
		last = --job->ready_count;
		job->events[0] = job->ready[place];
		job->ready[place] = job->ready[last];
		return 1;
	}
	return 0;
}

static enum fio_q_status engine_queue(struct thread_data *td, struct io_u *io_u)
{
	struct job *job = td->io_ops_data;
	uint64_t data = (uintptr_t)io_u;
	int error;

	fio_ro_check(td, io_u);
	switch (io_u->ddir) {
	case DDIR_READ:
		error = cbd_queue_read(job->queue, io_u->xfer_buf, io_u->xfer_buflen, io_u->offset, data);
		break;
	case DDIR_WRITE:
		error = cbd_queue_write(job->queue, io_u->xfer_buf, io_u->xfer_buflen, io_u->offset,
					td->o.sync_io ? CBD_FUA : 0, data);
		break;
	case DDIR_TRIM:
		error = cbd_queue_discard(job->queue, io_u->offset, io_u->xfer_buflen, data);
		break;
	case DDIR_SYNC:
	case DDIR_DATASYNC:
		error = cbd_queue_flush(job->queue, data);
		break;
	default:
		log_err("cbd: fio requests an operation that a disk does not support\n");
		error = -EINVAL;
	}
	if (!error)
		error = is_complete(td, job, data);
	if (!error)
		return FIO_Q_QUEUED;
	io_u->error = error > 0 ? -job->events[0].result : -error;
	if (io_u->error)
		td_verror(td, io_u->error, "xfer");
	return FIO_Q_COMPLETED;
}

static int engine_getevents(struct thread_data *td, unsigned int min, unsigned int max, const struct timespec *t)
{
	struct job *job = td->io_ops_data;
	int64_t timeout_ms = t ? (int64_t)t->tv_sec * 1000 + t->tv_nsec / 1000000 : -1;
	unsigned int room = td->o.iodepth - job->ready_count, given;
	unsigned int least = min > job->ready_count ? min - job->ready_count : 0;
	int count = cbd_queue_wait(job->queue, job->ready + job->ready_count, room, least, timeout_ms);

	if (count < 0)
		return count;
	job->ready_count += count;
	given = job->ready_count < max ? job->ready_count : max;
	memcpy(job->events, job->ready, given * sizeof(*job->events));
	job->ready_count -= given;
	memmove(job->ready, job->ready + given, job->ready_count * sizeof(*job->ready));
	return given;
}

static struct io_u *engine_event(struct thread_data *td, int event)
{
	struct job *job = td->io_ops_data;
	struct io_u *io_u = (struct io_u *)(uintptr_t)job->events[event].user_data;

	io_u->error = -job->events[event].result;
	return io_u;
}

/* The disk is already open, as long as the job uses it. */
static int engine_nothing(struct thread_data *td, struct fio_file *file)
{
	return 0;
}

/* The symbol that fio loads. */
struct ioengine_ops ioengine = {
	.name = "cbd",
	.version = FIO_IOOPS_VERSION,
	.flags = FIO_RAWIO | FIO_NOEXTEND | FIO_NODISKUTIL | FIO_DISKLESSIO,
	.setup = engine_setup,
	.init = engine_init,
	.cleanup = engine_cleanup,
	.queue = engine_queue,
	.getevents = engine_getevents,
	.event = engine_event,
	.open_file = engine_nothing,
	.close_file = engine_nothing,
	.invalidate = engine_nothing,
	.get_file_size = engine_nothing,
	.options = options,
	.option_struct_size = sizeof(struct options),
};
