//! Measures the export itself: 4 KiB requests through rings in shared memory to a device that consists of memory.
//!
//! `cargo run --release -p cbd-vhost --example vhost_latency [SPIN_US]`
//!
//! The client polls its ring without sleeping, and kicks only when the device wants a kick. With a spin of 0 the server
//! sleeps whenever it has no request, so each request at depth 1 includes a wake-up.

use cbd_export::MemoryDevice;
use cbd_pmem::Mapping;
use cbd_vhost::{Options, Server};
use std::error::Error;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};
use virtio_driver::{
    VhostUser, VirtioBlkConfig, VirtioBlkFeatureFlags, VirtioBlkQueue, VirtioBlkReqBuf, VirtioFeatureFlags,
    VirtioTransport,
};
use vm_memory::{FileOffset, MmapRegion};

const SIZE: u64 = 256 << 20;
const BLOCK: usize = 4096;
const SECONDS: u64 = 2;
const DEPTHS: [usize; 4] = [1, 4, 16, 64];

struct Client {
    transport: VhostUser<VirtioBlkConfig, VirtioBlkReqBuf>,
    queue: VirtioBlkQueue<'static, usize>,
    data: MmapRegion,
}

fn main() -> Result<(), Box<dyn Error>> {
    let spin = std::env::args().nth(1).map_or(Ok(50), |text| text.parse())?;
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("vhost.sock");
    let device = Arc::new(MemoryDevice::new(Arc::new(Mapping::anonymous(SIZE)?), 512)?);
    let options = Options { spin_max: Duration::from_micros(spin), ..Options::default() };
    let server = Server::start(device, &path, options)?;
    let mut client = Client::connect(path.to_str().ok_or("the path of a socket is text")?)?;
    // Writes every block once, so that no page is touched for the first time during the measurement.
    client.run(true, 16, |nth| nth, |nth, _| nth == SIZE as usize / BLOCK)?;
    for write in [true, false] {
        for depth in DEPTHS {
            client.measure(write, depth)?;
        }
    }
    drop(client);
    server.stop()?;
    Ok(())
}

impl Client {
    fn connect(path: &str) -> Result<Self, Box<dyn Error>> {
        let features = VirtioFeatureFlags::VERSION_1.bits()
            | VirtioFeatureFlags::RING_EVENT_IDX.bits()
            | VirtioBlkFeatureFlags::FLUSH.bits();
        let mut transport = VhostUser::new(path, features)?;
        let bytes = DEPTHS[DEPTHS.len() - 1] * BLOCK;
        let file = tempfile::tempfile_in("/dev/shm")?;
        file.set_len(bytes as u64)?;
        let data = MmapRegion::from_file(FileOffset::new(file.try_clone()?, 0), bytes)?;
        transport.map_mem_region(data.as_ptr() as usize, bytes, file.as_raw_fd(), 0)?;
        let mut queues = VirtioBlkQueue::setup_queues(&mut transport, 1, 256)?;
        let queue = queues.pop().ok_or("a device has a queue")?;
        Ok(Self { transport, queue, data })
    }

    /// Keeps `depth` requests in flight until `last` is true for the number of begun requests; returns the latency of
    /// each in ns.
    fn run(
        &mut self,
        write: bool,
        depth: usize,
        mut block: impl FnMut(usize) -> usize,
        last: impl Fn(usize, Duration) -> bool,
    ) -> Result<Vec<u64>, Box<dyn Error>> {
        let notifier = self.transport.get_submission_notifier(0);
        self.queue.set_used_notif_enabled(false);
        let mut free = (0..depth).collect::<Vec<_>>();
        let mut begun = vec![Instant::now(); depth];
        let mut taken = Vec::with_capacity(4 << 20);
        let (began, mut count) = (Instant::now(), 0);
        loop {
            let ended = last(count, began.elapsed());
            while !ended && let Some(slot) = free.pop() {
                let offset = (block(count) * BLOCK) as u64;
                let buffer = self.data.as_ptr().wrapping_add(slot * BLOCK);
                begun[slot] = Instant::now();
                // SAFETY: the buffer lies in memory that is shared with the server, belongs to this slot, and lives
                // until the end.
                unsafe {
                    if write {
                        self.queue.write_raw(offset, buffer, BLOCK, slot)?;
                    } else {
                        self.queue.read_raw(offset, buffer, BLOCK, slot)?;
                    }
                }
                count += 1;
                if last(count, Duration::ZERO) {
                    break;
                }
            }
            if self.queue.avail_notif_needed() {
                notifier.notify()?;
            }
            for done in self.queue.completions() {
                if done.ret != 0 {
                    return Err(std::io::Error::from_raw_os_error(-done.ret).into());
                }
                taken.push(begun[done.context].elapsed().as_nanos() as u64);
                free.push(done.context);
            }
            if ended && free.len() == depth {
                return Ok(taken);
            }
            std::hint::spin_loop();
        }
    }

    fn measure(&mut self, write: bool, depth: usize) -> Result<(), Box<dyn Error>> {
        let mut state = 0x9E37_79B9_7F4A_7C15_u64;
        let random = move |_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state % (SIZE / BLOCK as u64)) as usize
        };
        let end = Duration::from_secs(SECONDS);
        let mut nanoseconds = self.run(write, depth, random, |_, elapsed| elapsed >= end)?;
        nanoseconds.sort_unstable();
        let at = |share: f64| nanoseconds[((nanoseconds.len() - 1) as f64 * share) as usize] as f64 / 1000.0;
        println!(
            "4 KiB {:5} depth {depth:2}: {:8.0} IOPS, p50 {:6.2} us, p99 {:6.2}, p99.9 {:6.2}",
            if write { "write" } else { "read" },
            nanoseconds.len() as f64 / SECONDS as f64,
            at(0.5),
            at(0.99),
            at(0.999),
        );
        Ok(())
    }
}
