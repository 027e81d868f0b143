//! The tables of a transport: crashes at every store, failed pages, earlier backends in the same rows.

mod crashes;
mod earlier_lives;
mod extend;
mod failed_pages;
mod features;
mod grow;
mod moved;
mod pins;
mod rig;
