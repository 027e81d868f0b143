//! The manager over regions in files, with NBD as the export: starting, restoring and refusing objects.

mod backends;
mod changed_files;
mod events;
mod exchanged_disks;
mod failing_disks;
mod fixture;
mod grow;
mod hosts;
mod map;
mod modes;
mod names;
mod other_machines;
mod pins;
mod quarantined;
mod reconnecting_clients;
mod refusals;
mod regions;
mod remote;
mod same_disks;
mod scrub;
mod shared;
mod silent;
mod sockets;
mod stopping;
mod together;
mod verified_by_nbd;
