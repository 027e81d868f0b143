//! The settings in the help of `set`.

pub(super) const HELP: &str = "\
Settings:
  gc_percent=0..98                      share of used segments from which space is reclaimed
  consistency=strict|checkpoint|none    how the backing device catches up
  writeback_rate=auto|SIZE              bytes a second that writeback may write, from 32K
  writeback_percent=0..90               share of the cache that is dirty while data is written
  on_write_error=stop|park              what is done about what the disk has refused for long
  write_error_after_s=0..86400          how many seconds that is
  writeback=on|paused:TIME              pause writeback for a time, e.g. 10m; drains still run
  read_latency_target_us=off|US         writeback yields when reads of the disk take longer
  cache_mode=MODE                       writeback, writethrough, writearound or passthrough
  read_fill=admit|all|off               which misses are recorded
  sequential_read_cutoff=off|SIZE       longer sequential reads are not recorded
  readahead=auto|off                    whether sequential reads that miss are read ahead
  sequential_write_cutoff=off|SIZE      longer sequential writes go to the disk alone
  when_full=wait|around                 what a write does that finds no space
  congestion_read_us=off|US             latency of the cache above which reads go past it
  congestion_write_us=off|US            the same for writes
  pin_percent=1..60                     share of the cache that pins may take
  metadata_min_percent=0..59            share that metadata keeps; with pin_percent 60
  metadata_max_percent=1..100           share above which metadata is not preferred
  scrub_every=never|TIME                how often the device is scrubbed, e.g. 14d
  scrub_window=off|HH:MM-HH:MM          when scheduled scrubs run, in UTC
  scrub_rate=off|SIZE                   bytes a second that a scrub looks at, from 64K
  scrub_idle_only=yes|no                whether a scrub waits while clients use the cache
  offload=auto|on|never                 whether the disk verifies ranges by its own commands
  recovery_point_max_age=none|TIME      writeback keeps the recovery point younger, e.g. 30s
  class=none|metadata                   of a block device (-d) without marked requests
  name=NAME                             the name, for -b and -d and for links; name= takes it away";
