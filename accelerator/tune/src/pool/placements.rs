use std::collections::{BTreeMap, VecDeque};

use crate::runner::{Answer, TrialStart};
use crate::slots::Slots;
use crate::trial_id::TrialId;

/// The slot of each trial, and the turns in each slot.
#[derive(Debug)]
pub(super) struct Placements {
    slots: Slots,
    trials: BTreeMap<TrialId, Placement>,
    /// The turns that wait, by slot.
    turns: Vec<VecDeque<Turn>>,
}

#[derive(Debug)]
struct Placement {
    slot: usize,
    /// It was told to end, and does not count for its slot any more.
    is_stopping: bool,
}

/// A trial's turn in its slot.
#[derive(Debug)]
pub(super) enum Turn {
    Start(TrialStart),
    Answer(TrialId, Answer),
}

impl Placements {
    pub(super) fn new(slots: Slots) -> Self {
        Self {
            turns: (0..slots.len()).map(|_| VecDeque::new()).collect(),
            trials: BTreeMap::new(),
            slots,
        }
    }

    pub(super) fn slots(&self) -> &Slots {
        &self.slots
    }

    pub(super) fn is_computing(&self, trial: TrialId) -> bool {
        let placement = self.trials.get(&trial);
        placement.is_some_and(|placement| self.slots[placement.slot].active == Some(trial))
    }

    /// Gives a trial the slot with the fewest; it waits for its turn there.
    pub(super) fn place(&mut self, start: TrialStart) -> usize {
        let mut counts = vec![0; self.slots.len()];
        for placement in self.trials.values().filter(|trial| !trial.is_stopping) {
            counts[placement.slot] += 1;
        }
        let slots = counts.iter().enumerate();
        let fewest = slots.min_by_key(|(_, count)| **count);
        let slot = fewest.map_or(0, |(slot, _)| slot);
        let placement = Placement {
            slot,
            is_stopping: false,
        };
        self.trials.insert(start.trial, placement);
        self.turns[slot].push_back(Turn::Start(start));
        slot
    }

    /// A trial waits for its turn to go on as it is told; its slot.
    pub(super) fn answer(&mut self, trial: TrialId, answer: Answer) -> Option<usize> {
        let placement = self.trials.get_mut(&trial)?;
        placement.is_stopping |= matches!(answer, Answer::Pause(_) | Answer::Stop);
        let turns = &mut self.turns[placement.slot];
        match answer {
            // It takes no time, and its worker may take the next trial.
            Answer::Stop => turns.push_front(Turn::Answer(trial, answer)),
            answer => turns.push_back(Turn::Answer(trial, answer)),
        }
        Some(placement.slot)
    }

    /// The next turn of a slot, where none is under way.
    pub(super) fn next_turn(&mut self, slot: usize) -> Option<Turn> {
        if self.slots[slot].active.is_some() {
            return None;
        }
        let turn = self.turns[slot].pop_front()?;
        self.slots[slot].active = Some(turn.trial());
        Some(turn)
    }

    /// A trial's turn is over: it does not compute at present. Its slot.
    pub(super) fn end_turn(&mut self, trial: TrialId) -> Option<usize> {
        let slot = self.trials.get(&trial)?.slot;
        let active = &mut self.slots[slot].active;
        if *active == Some(trial) {
            *active = None;
        }
        Some(slot)
    }

    /// A trial is not one of its slot's any more; the slot.
    pub(super) fn remove(&mut self, trial: TrialId) -> Option<usize> {
        let slot = self.end_turn(trial)?;
        self.trials.remove(&trial);
        self.turns[slot].retain(|turn| turn.trial() != trial);
        Some(slot)
    }
}

impl Turn {
    fn trial(&self) -> TrialId {
        match self {
            Self::Start(start) => start.trial,
            Self::Answer(trial, _) => *trial,
        }
    }
}
