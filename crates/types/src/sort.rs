//! Sorting on a small stack.
//!
//! The sorts of the standard library keep up to 4 KiB of elements on the stack, and the unstable one is recursive. A
//! kernel stack has 16 KiB in total.

/// Sorts `items` by `key`, in place, without recursion. The order of elements with equal keys is unspecified. Sorted
/// input takes one comparison for each element.
pub fn heap_sort_by_key<T, K: Ord>(items: &mut [T], key: impl Fn(&T) -> K) {
    if items.is_sorted_by_key(&key) {
        return;
    }
    for root in (0..items.len() / 2).rev() {
        sift_down(items, root, &key);
    }
    for end in (1..items.len()).rev() {
        items.swap(0, end);
        sift_down(&mut items[..end], 0, &key);
    }
}

/// Moves the element at `root` down until no element below it is larger.
fn sift_down<T, K: Ord>(items: &mut [T], mut root: usize, key: &impl Fn(&T) -> K) {
    loop {
        let mut child = 2 * root + 1;
        if child >= items.len() {
            return;
        }
        if child + 1 < items.len() && key(&items[child]) < key(&items[child + 1]) {
            child += 1;
        }
        if key(&items[root]) >= key(&items[child]) {
            return;
        }
        items.swap(root, child);
        root = child;
    }
}

#[cfg(test)]
mod tests {
    use super::heap_sort_by_key;
    use alloc::vec::Vec;

    #[test]
    fn it_sorts_as_the_standard_library_does() {
        let mut random = 7_u64;
        for length in (0..20).chain([255, 256, 257, 4000]) {
            for below in [1, 2, 10, u64::MAX] {
                let mut items: Vec<(u64, usize)> = (0..length)
                    .map(|number| {
                        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                        ((random >> 7) % below, number)
                    })
                    .collect();
                let mut expected = items.clone();
                expected.sort();
                heap_sort_by_key(&mut items, |item| *item);
                assert_eq!(items, expected, "{length} below {below}");
                heap_sort_by_key(&mut items, |item| core::cmp::Reverse(*item));
                expected.reverse();
                assert_eq!(items, expected, "{length} below {below}, descending");
            }
        }
    }
}
