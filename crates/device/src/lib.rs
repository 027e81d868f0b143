//! A blkdev: requests split at chunks, run on the cache, parked while they wait
