/// Times in which something was under way, without overlaps, in order.
#[derive(Debug, Default)]
pub(super) struct Intervals(Vec<(u64, u64)>);

impl Intervals {
    pub(super) fn new() -> Self {
        Self(Vec::with_capacity(64))
    }

    /// Adds one that ends after those before; what they cover already is cut off.
    pub(super) fn push(&mut self, start: u64, end: u64) {
        let covered = self.0.last().map_or(0, |last| last.1);
        let start = start.max(covered);
        if start < end {
            self.0.push((start, end));
        }
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    /// Returns their total length.
    pub(super) fn length(&self) -> u64 {
        self.0.iter().map(|(start, end)| end - start).sum()
    }

    /// Returns how long both are under way together.
    pub(super) fn common(&self, other: &Self) -> u64 {
        let (mut mine, mut theirs) = (self.0.iter().peekable(), other.0.iter().peekable());
        let mut sum = 0;
        while let (Some(a), Some(b)) = (mine.peek(), theirs.peek()) {
            sum += a.1.min(b.1).saturating_sub(a.0.max(b.0));
            // The one that ends first meets nothing more.
            if a.1 <= b.1 {
                mine.next();
            } else {
                theirs.next();
            }
        }
        sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(times: &[(u64, u64)]) -> Intervals {
        let mut intervals = Intervals::new();
        for (start, end) in times {
            intervals.push(*start, *end);
        }
        intervals
    }

    #[test]
    fn what_is_covered_twice_counts_once() {
        assert_eq!(of(&[(1, 4), (2, 6), (6, 6), (8, 9)]).length(), 6);
        assert_eq!(of(&[(2, 6), (3, 5)]).length(), 4);
    }

    #[test]
    fn common_time_is_that_of_both() {
        let long = of(&[(0, 100)]);
        let short = of(&[(10, 20), (30, 35), (90, 120)]);
        assert_eq!((long.common(&short), short.common(&long)), (25, 25));
        assert_eq!(of(&[(0, 5), (10, 15)]).common(&of(&[(5, 10), (15, 20)])), 0);
        assert_eq!(of(&[(0, 5), (6, 9)]).common(&of(&[(4, 7)])), 2);
        assert_eq!(long.common(&of(&[])), 0);
    }
}
