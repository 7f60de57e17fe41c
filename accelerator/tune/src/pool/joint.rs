use std::collections::VecDeque;

use crate::trial::protocol::FromWorker;

/// What all ranks of a worker say, each in the same order, though one may be ahead of another.
#[derive(Debug)]
pub(super) struct JointMessages {
    by_rank: Vec<VecDeque<FromWorker>>,
}

impl JointMessages {
    pub(super) fn new(ranks: usize) -> Self {
        Self {
            by_rank: vec![VecDeque::new(); ranks],
        }
    }

    /// Takes what a rank says; returns what rank 0 said, once the last rank has said as much. A checkpoint of which one rank
    /// left out its part is left out.
    pub(super) fn push(&mut self, rank: usize, said: FromWorker) -> Option<FromWorker> {
        self.by_rank.get_mut(rank)?.push_back(said);
        if self.by_rank.iter().any(VecDeque::is_empty) {
            return None;
        }
        let said: Vec<_> = self
            .by_rank
            .iter_mut()
            .filter_map(VecDeque::pop_front)
            .collect();
        if said.contains(&FromWorker::Skipped) {
            return Some(FromWorker::Skipped);
        }
        said.into_iter().next()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use FromWorker::{Left, Saved, Skipped};

    #[test]
    fn a_rank_that_is_ahead_does_not_speak_for_the_others() {
        let mut ranks = JointMessages::new(2);
        let said = [(0, Saved), (0, Left), (1, Saved), (1, Left)]
            .map(|(rank, said)| ranks.push(rank, said));
        assert_eq!(said, [None, None, Some(Saved), Some(Left)]);
        let said = [(1, Skipped), (1, Left), (0, Saved), (0, Left)]
            .map(|(rank, said)| ranks.push(rank, said));
        assert_eq!(said, [None, None, Some(Skipped), Some(Left)]);
        assert_eq!(JointMessages::new(1).push(0, Left), Some(Left));
    }
}
