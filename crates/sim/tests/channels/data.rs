//! Data that does not arrive as it was sent, and requests that their client has given up.

use super::*;
use cbd_format::crc32c;

#[test]
fn a_write_whose_data_has_not_arrived_is_submitted_again_and_fails_in_the_end() {
    for tries in [1, 4] {
        let mut rig = Rig::new();
        rig.client.submit(
            Request::unmarked(
                0,
                Operation::Write,
                ByteRange::at(0, 4096),
                false,
                AlignedBuffer::zeroed(4096),
            ),
            &mut rig.done,
        );
        for number in 0..tries {
            damage(&rig, areas().client + shape().data(number));
            rig.server.poll(&mut rig.taken).expect("there is memory");
            let mut request = rig.taken.pop().expect("it has arrived");
            let result = request.check_data(crc32c);
            assert_eq!(result.as_ref().map_err(Error::kind), Err(ErrorKind::Mismatch));
            rig.server.complete(Completion { id: request.id, result, buffer: request.buffer });
            rig.client.poll(&mut rig.done);
        }
        rig.poll();
        rig.taken.iter_mut().for_each(|request| request.check_data(crc32c).expect("it is intact"));
        rig.complete();
        let expected = if tries == 1 { None } else { Some(ErrorKind::Media) };
        assert_eq!((rig.ended(), rig.client.repeated()), (vec![(0, expected)], u64::from(tries.min(3))));
    }
}

#[test]
fn data_that_differs_from_the_checksum_of_its_sender_is_not_submitted() {
    let mut rig = Rig::new();
    let write = |id, flipped| {
        let buffer = AlignedBuffer::from_slice(&[7; 512]);
        let data_crc = Some(crc32c(&buffer) ^ flipped);
        let request = Request::unmarked(id, Operation::Write, ByteRange::at(0, 512), false, buffer);
        Request { data_crc, ..request }
    };
    rig.client.submit(write(0, 1), &mut rig.done);
    rig.client.submit(write(1, 0), &mut rig.done);
    rig.poll();
    assert_eq!((ids(&rig.taken), rig.ended()), (vec![0], vec![(0, Some(ErrorKind::Mismatch))]));
    rig.complete();
    assert_eq!(rig.ended(), [(1, None)]);
}

#[test]
fn what_a_client_has_left_in_its_ring_is_not_executed_once_its_session_has_ended() {
    // The server is paused, and so is its successor.
    for dies in [false, true] {
        let mut rig = Rig::new();
        for id in 0..3 {
            let range = ByteRange::at(id * 4096, 4096);
            let request = Request::unmarked(id, Operation::Write, range, false, AlignedBuffer::zeroed(4096));
            rig.client.submit(request, &mut rig.done);
        }
        rig.client.end(&mut rig.done);
        assert_eq!(rig.ended().len(), 3);
        assert!(!rig.client.is_over(), "the server may execute them");
        if dies {
            restart(&mut rig, 33);
            assert!(!rig.client.is_over());
        }
        for _ in 0..100 {
            rig.server.poll(&mut rig.taken).expect("there is memory");
        }
        assert_eq!((ids(&rig.taken), rig.server.in_flight()), (vec![], 0));
        assert_eq!((rig.server.state(), rig.client.is_over()), (ServerState::Alone, true), "dies: {dies}");
        // It says so once: each store wakes the other host.
        let stores = rig.server.stores();
        for _ in 0..100 {
            rig.server.poll(&mut rig.taken).expect("there is memory");
        }
        assert_eq!(rig.server.stores(), stores);
    }
}

#[test]
fn a_session_is_over_once_the_requests_that_have_begun_are_complete() {
    let mut rig = Rig::new();
    rig.submit(0, Operation::Write, ByteRange::at(0, 4096));
    assert_eq!(ids(&rig.taken), [0]);
    rig.client.end(&mut rig.done);
    rig.poll();
    assert!(!rig.client.is_over());
    rig.complete();
    assert!(rig.client.is_over());
    // Another client's session hides that of this one.
    let second = Client::open(region(&rig.medium, 2), areas(), shape(), 12).expect("there is memory");
    let former = std::mem::replace(&mut rig.client, second);
    rig.poll();
    assert!(rig.client.geometry().is_some() && former.is_over());
}
