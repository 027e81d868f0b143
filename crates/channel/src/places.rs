//! Which request in flight has which data place, for both sides of a channel.
//!
//! Invariant: requests are found by the number of their submission without a search, as long as the other side follows the rules.

use crate::area::reserve;
use alloc::vec::Vec;
use cbd_format::ChannelShape;
use cbd_types::Result;

/// A request in flight.
pub trait Submitted: Copy {
    /// The number of its submission.
    fn sequence(&self) -> u64;
}

/// What is in flight, by data place.
pub struct Places<T> {
    items: Vec<Option<T>>,
    in_flight: usize,
    /// The place behind the one that was given last.
    next: usize,
    /// By the place in the ring of submissions: the data place of the last one there.
    of_entries: Vec<usize>,
}

impl<T: Submitted> Places<T> {
    /// Nothing is in flight.
    ///
    /// # Errors
    /// [`System`](cbd_types::ErrorKind::System) without memory.
    pub fn new(shape: &ChannelShape) -> Result<Self> {
        let (mut items, mut of_entries) = (Vec::new(), Vec::new());
        reserve(&mut items, shape.places() as usize)?;
        reserve(&mut of_entries, shape.entries() as usize)?;
        items.resize(shape.places() as usize, None);
        of_entries.resize(shape.entries() as usize, 0);
        Ok(Self { items, in_flight: 0, next: 0, of_entries })
    }

    /// How many places there are.
    pub const fn count(&self) -> usize {
        self.items.len()
    }

    /// How many have something in flight.
    pub const fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// What has this place.
    pub fn get(&self, place: usize) -> Option<&T> {
        self.items.get(place)?.as_ref()
    }

    /// What is in flight, with its places.
    pub fn iter(&self) -> impl Iterator<Item = (usize, &T)> {
        self.items.iter().enumerate().filter_map(|(place, item)| Some((place, item.as_ref()?)))
    }

    /// The same without places, the latest ones first: with few in flight only few places are looked at.
    pub fn latest(&self) -> impl Iterator<Item = &T> {
        let (before, from) = self.items.split_at(self.next);
        before.iter().rev().chain(from.iter().rev()).flatten().take(self.in_flight)
    }

    /// A free place. Places are used in turn.
    pub fn free(&self) -> Option<usize> {
        let (before, from) = self.items.split_at(self.next);
        let later = from.iter().position(Option::is_none).map(|place| self.next + place);
        later.or_else(|| before.iter().position(Option::is_none))
    }

    /// Gives a place to a request.
    pub fn put(&mut self, place: usize, item: T) {
        let entry = self.entry_of(item.sequence());
        self.of_entries[entry] = place;
        self.next = (place + 1) % self.items.len();
        if self.items[place].replace(item).is_none() {
            self.in_flight += 1;
        }
    }

    /// The place of the submission with this number.
    pub fn find(&self, sequence: u64) -> Option<usize> {
        let is_it = |item: &Option<T>| item.is_some_and(|item| item.sequence() == sequence);
        let probable = self.of_entries[self.entry_of(sequence)];
        // A client that breaks the rules may have submissions of one entry in flight.
        if is_it(&self.items[probable]) { Some(probable) } else { self.items.iter().position(is_it) }
    }

    /// What is in flight of the submission whose entry the one with this number replaces.
    pub fn replaced_by(&self, sequence: u64) -> Option<&T> {
        let last = self.get(self.of_entries[self.entry_of(sequence)]);
        last.filter(|last| last.sequence() + self.of_entries.len() as u64 == sequence)
    }

    /// Frees a place.
    pub fn take(&mut self, place: usize) -> Option<T> {
        let taken = self.items[place].take()?;
        self.in_flight -= 1;
        Some(taken)
    }

    /// Frees all places.
    pub fn clear(&mut self) {
        self.items.iter_mut().for_each(|item| *item = None);
        self.in_flight = 0;
    }

    const fn entry_of(&self, sequence: u64) -> usize {
        (sequence % self.of_entries.len() as u64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    impl Submitted for u64 {
        fn sequence(&self) -> u64 {
            *self
        }
    }

    #[test]
    fn a_request_is_found_by_its_number_also_behind_another_one_of_the_same_entry() {
        let shape = ChannelShape::new(4, 4096).expect("it is possible");
        let mut places = Places::new(&shape).expect("there is memory");
        let entries = shape.entries();
        for (place, sequence) in [(2, 1), (0, 1 + entries), (3, 7)] {
            places.put(place, sequence);
        }
        assert_eq!(places.in_flight(), 3);
        for (place, sequence) in [(Some(2), 1), (Some(0), 1 + entries), (Some(3), 7), (None, 7 + entries)] {
            assert_eq!(places.find(sequence), place, "submission {sequence}");
        }
        assert_eq!(places.replaced_by(7 + entries), Some(&7));
        assert_eq!((places.replaced_by(7), places.replaced_by(7 + 2 * entries)), (None, None));
        assert_eq!(places.take(3), Some(7));
        assert_eq!((places.take(3), places.find(7), places.replaced_by(7 + entries)), (None, None, None));
        // A submission that is repeated under another number keeps its place.
        places.put(0, 9);
        assert_eq!((places.in_flight(), places.find(1 + entries), places.find(9)), (2, None, Some(0)));
        assert_eq!(places.iter().collect::<Vec<_>>(), [(0, &9), (2, &1)]);
        places.clear();
        assert_eq!((places.in_flight(), places.iter().count()), (0, 0));
    }

    #[test]
    fn places_are_used_in_turn() {
        let shape = ChannelShape::new(3, 4096).expect("it is possible");
        let mut places = Places::new(&shape).expect("there is memory");
        let mut used = Vec::new();
        for sequence in 0..3 {
            used.extend(places.free());
            places.put(used[sequence as usize], sequence);
        }
        assert_eq!((used, places.free()), (vec![0, 1, 2], None));
        assert_eq!(places.latest().copied().collect::<Vec<_>>(), [2, 1, 0]);
        for (place, next) in [(1, Some(1)), (0, Some(0)), (2, Some(0))] {
            places.take(place);
            assert_eq!(places.free(), next, "place {place} is free, too");
        }
        places.put(1, 3);
        assert_eq!((places.free(), places.latest().collect::<Vec<_>>()), (Some(2), vec![&3]));
        places.put(2, 4);
        places.put(0, 5);
        assert_eq!(places.latest().copied().collect::<Vec<_>>(), [5, 4, 3]);
    }
}
