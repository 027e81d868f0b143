//! The channel by which a host uses a block device that another host serves: rings and data in shared memory.
//!
//! The [`Client`] stores requests in an area of its own, and the [`Server`], which executes them, completions in another one. Each
//! polls what the other stores. Nothing is compared and swapped, and memory need not be coherent between the hosts: every line has one
//! writer, which publishes it, and the reader drops its copy before it looks. An entry is one line with a checksum, the sessions of both
//! sides and its number, so a reader takes it whole, once, and in order.
//!
//! **A server that ends and comes back** continues the session: in the rings it finds which requests have no completion, and executes
//! those, before any new one ([`Server::is_settled`]). A request that the former process had executed is then executed twice, which
//! changes nothing: the client holds a request back while one in flight overlaps it and one of both changes the device, so that nothing
//! else was stored in the range meanwhile. To the client the server was slow.
//!
//! Where the rings have damage, the former process served another client, or the machine has crashed, the server begins another session.
//! Its client submits all requests in flight again. With several clients those may be executed behind newer ones of others.
//!
//! **Several clients of one device** have a channel each. [`Exclusion`] keeps their requests that overlap apart until the completion of the
//! earlier one is stored. So no client has seen what a change without a completion has stored, and those that are outstanding after a
//! restart can be executed in any order, as if for the first time, if reads and new changes wait for all of them.
//!
//! **A client that comes back** has another session, too. The server ends what is in flight of the former one before it accepts the new
//! one, so nothing is executed late.
//!
//! **Damage and malice**: what the other side has stored is copied, checked and bounded. An entry that makes no sense fails that
//! request alone; data that differs from its checksum is asked for again; a line that never arrives is stored again by
//! [`Client::nudge`]. The checksum of a block of 4 KiB is the one that its record gets: the device that stores the record compares
//! both ([`Request::data_crc`](cbd_types::Request)), before anything refers to the data.
//!
//! Elsewhere: the structures (`cbd-format`, `channel`), which memory a channel has and who polls it.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

mod area;
mod client;
mod exclusion;
mod places;
mod resume;
mod server;
mod wire;

pub use area::Areas;
pub use client::Client;
pub use exclusion::Exclusion;
pub use server::{Server, ServerState};
