use std::collections::VecDeque;

use crate::trial::protocol::FromWorker;

/// Messages that all ranks of a worker send, each in the same order, though one may be ahead of another.
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

    /// Adds a rank's message; returns rank 0's once every rank has sent one. A checkpoint of which one rank skipped its part is
    /// skipped.
    pub(super) fn push(&mut self, rank: usize, message: FromWorker) -> Option<FromWorker> {
        self.by_rank.get_mut(rank)?.push_back(message);
        if self.by_rank.iter().any(VecDeque::is_empty) {
            return None;
        }
        let messages: Vec<_> = self
            .by_rank
            .iter_mut()
            .filter_map(VecDeque::pop_front)
            .collect();
        if messages.contains(&FromWorker::Skipped) {
            return Some(FromWorker::Skipped);
        }
        messages.into_iter().next()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use FromWorker::{Saved, Skipped, Stopped};

    #[test]
    fn a_rank_that_is_ahead_does_not_speak_for_the_others() {
        let mut ranks = JointMessages::new(2);
        let complete = [(0, Saved), (0, Stopped), (1, Saved), (1, Stopped)]
            .map(|(rank, message)| ranks.push(rank, message));
        assert_eq!(complete, [None, None, Some(Saved), Some(Stopped)]);
        let complete = [(1, Skipped), (1, Stopped), (0, Saved), (0, Stopped)]
            .map(|(rank, message)| ranks.push(rank, message));
        assert_eq!(complete, [None, None, Some(Skipped), Some(Stopped)]);
        assert_eq!(JointMessages::new(1).push(0, Stopped), Some(Stopped));
    }
}
