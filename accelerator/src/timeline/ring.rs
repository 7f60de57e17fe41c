/// The newest of what was put in, in memory that is taken once.
#[derive(Debug)]
pub(super) struct RingBuffer<T> {
    capacity: usize,
    items: Vec<T>,
    /// The number of items put in.
    count: u64,
}

impl<T: Copy> RingBuffer<T> {
    pub(super) fn new(capacity: usize) -> Self {
        Self {
            capacity,
            items: Vec::with_capacity(capacity),
            count: 0,
        }
    }

    pub(super) fn push(&mut self, item: T) {
        if self.items.len() < self.capacity {
            self.items.push(item);
        } else if self.capacity > 0 {
            let oldest = (self.count % self.capacity as u64) as usize;
            self.items[oldest] = item;
        }
        self.count += 1;
    }

    /// Forgets everything, and keeps the memory.
    pub(super) fn clear(&mut self) {
        self.items.clear();
        self.count = 0;
    }

    /// Returns the number of items that are gone.
    pub(super) fn dropped(&self) -> u64 {
        self.count - self.items.len() as u64
    }

    /// Returns the items that are there, in no particular order.
    pub(super) fn items(&self) -> &[T] {
        &self.items
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_stay() {
        let mut ring = RingBuffer::new(3);
        for item in 0..8 {
            ring.push(item);
        }
        let mut items = ring.items().to_vec();
        items.sort_unstable();
        assert_eq!((items, ring.dropped()), (vec![5, 6, 7], 5));
        ring.clear();
        ring.push(9);
        assert_eq!((ring.items(), ring.dropped()), (&[9][..], 0));
        let mut none = RingBuffer::new(0);
        none.push(1);
        assert_eq!((none.items().len(), none.dropped()), (0, 1));
    }
}
