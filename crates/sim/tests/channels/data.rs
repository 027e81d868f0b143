//! Data that does not arrive as it was sent.

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
