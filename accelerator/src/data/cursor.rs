use std::sync::{Arc, Weak};

use accelerator_host::sync::Mutex;
use serde::{Deserialize, Serialize};

use super::exchange_step::ReadPosition;
use super::steppers::{AdvancesCursor, Steppers};
use crate::core::error::{self, Once};

/// A place in an epoch: what lies before it is used.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub(crate) struct EpochPosition {
    pub(crate) epoch: u64,
    /// The samples used, over all ranks.
    pub(crate) consumed: u64,
    /// The digest of the order of the epoch, if the program gave it.
    #[serde(default)]
    pub(crate) digest: Option<u64>,
    /// Set once the program has seen the end of the epoch.
    pub(crate) finished: bool,
    /// Batches a rank.
    pub(crate) step: u64,
}

impl EpochPosition {
    pub(crate) fn start_of(epoch: u64) -> Self {
        Self {
            epoch,
            ..Self::default()
        }
    }

    /// Continues to another place in the epoch, unless it lies behind it already. Tells whether it was not there yet.
    fn reach(&mut self, other: Self) -> bool {
        let is_new = other.step > self.step;
        if other.step >= self.step {
            *self = other;
        }
        is_new
    }

    /// The epoch with which a program continues.
    pub(crate) fn next_epoch(self) -> u64 {
        self.epoch + u64::from(self.finished)
    }
}

/// The position of the program in a loader.
///
/// Batches that went into a gradient are used when an optimizer has stepped with it, not before: what was
/// read ahead, yielded, averaged, or added to a window that failed is not. In a loader whose batches never go
/// to `backward` (for evaluation, or where a bare count is passed), what was yielded is used.
#[derive(Debug, Default)]
pub(super) struct Cursor(Mutex<CursorState>);

/// The position at which another process stood.
#[derive(Clone, Debug)]
pub(super) struct Restored {
    pub(super) position: Option<EpochPosition>,
    pub(super) steppers: Steppers,
    /// Set if an optimizer has stepped with its batches.
    pub(super) trained: bool,
    /// Set if an epoch that is not finished is continued.
    pub(super) continues: bool,
    /// The epoch that `Position::epoch` gives for this loader, where this rank is to say that an earlier one is trained.
    pub(super) first_epoch: Option<u64>,
}

#[derive(Debug, Default)]
struct CursorState {
    /// Set once gradients were made from batches, in this process or an earlier one.
    begun: bool,
    /// The pass that was trained on last.
    current: Option<Arc<EpochPass>>,
    /// See [`Restored::first_epoch`].
    first_epoch: Option<u64>,
    /// The pass that was begun last.
    latest: Option<Arc<EpochPass>>,
    /// The place at which the epoch of that number continues. It holds until something of the epoch is used, so that a
    /// look at a first batch does not use it up.
    resume: Option<EpochPosition>,
    /// The position of an earlier process.
    restored: Option<EpochPosition>,
    steppers: Steppers,
    /// Set once a model has stepped with its batches, in this process or an earlier one.
    trained: bool,
    padding_warned: Once,
    empty_warned: Once,
}

impl Cursor {
    pub(super) fn restored(from: Restored) -> Arc<Self> {
        Arc::new(Self(Mutex::new(CursorState {
            resume: from
                .position
                .filter(|position| from.continues && !position.finished),
            restored: from.position,
            begun: from.trained,
            steppers: from.steppers,
            trained: from.trained,
            first_epoch: from.first_epoch,
            ..CursorState::default()
        })))
    }

    /// Begins a pass over that epoch, where it is to begin.
    pub(super) fn begin(self: &Arc<Self>, epoch: u64) -> Arc<EpochPass> {
        let mut state = self.0.lock();
        let start = state
            .resume
            .filter(|position| position.epoch == epoch)
            .unwrap_or(EpochPosition::start_of(epoch));
        let pass = Arc::new(EpochPass {
            cursor: Arc::downgrade(self),
            progress: Mutex::new(Progress {
                is_open: true,
                trained: start,
                used: start,
                yielded: start,
            }),
        });
        state.latest = Some(pass.clone());
        pass
    }

    /// Returns the current position; `None` if the loader was never read.
    pub(super) fn position(&self) -> Option<EpochPosition> {
        let state = self.0.lock();
        let latest = state.latest.as_ref().map(|pass| pass.progress());
        let current = state.current.as_ref().map(|pass| pass.progress());
        let of = |progress: Progress| {
            if state.begun && (progress.waits() || !progress.yielded.finished) {
                progress.used
            } else {
                progress.yielded
            }
        };
        match (current, latest) {
            // An epoch was left before its end, and the next one has begun.
            (Some(current), Some(latest))
                if !current.is_open && !current.yielded.finished && latest.is_open =>
            {
                Some(of(latest))
            }
            (Some(progress), _) | (None, Some(progress)) => Some(of(progress)),
            (None, None) => state.restored,
        }
    }

    pub(super) fn is_trained(&self) -> bool {
        self.0.lock().trained
    }

    /// Tells if gradients were made from a batch that is not used yet.
    pub(super) fn waits(&self) -> bool {
        let state = self.0.lock();
        let mut passes = state.current.iter().chain(&state.latest);
        passes.any(|pass| pass.progress().waits())
    }

    /// Tells if the program is taking its batches.
    pub(super) fn is_open(&self) -> bool {
        let state = self.0.lock();
        let latest = state.latest.as_ref();
        latest.is_some_and(|pass| pass.progress().is_open)
    }

    pub(super) fn steppers(&self) -> Steppers {
        self.0.lock().steppers.clone()
    }
}

/// One pass over an epoch.
#[derive(Debug)]
pub(crate) struct EpochPass {
    /// The cursor, gone with the loader, which its iterators may outlive.
    cursor: Weak<Cursor>,
    progress: Mutex<Progress>,
}

#[derive(Clone, Copy, Debug)]
struct Progress {
    /// Set while its iterator lives.
    is_open: bool,
    /// The end of the batches from which gradients were made, whose step may be to come.
    trained: EpochPosition,
    used: EpochPosition,
    yielded: EpochPosition,
}

impl Progress {
    /// Tells if gradients were made that no optimizer has stepped with yet.
    fn waits(&self) -> bool {
        self.used != self.trained
    }
}

impl EpochPass {
    /// Returns where it began, and then the end of the batches that were yielded.
    pub(super) fn yielded(&self) -> EpochPosition {
        self.progress().yielded
    }

    /// Records the digest of the order that the program gave.
    pub(super) fn deal(&self, digest: Option<u64>) {
        let mut progress = self.progress.lock();
        progress.trained.digest = digest;
        progress.used.digest = digest;
        progress.yielded.digest = digest;
    }

    pub(super) fn advance(&self, to: EpochPosition) {
        self.progress.lock().yielded = to;
    }

    /// The program saw the end of the epoch.
    pub(super) fn finish(&self) {
        self.progress.lock().yielded.finished = true;
        let epoch = self.yielded().epoch;
        let Some(cursor) = self.cursor.upgrade() else {
            return;
        };
        let mut state = cursor.0.lock();
        state.resume = state.resume.filter(|position| position.epoch != epoch);
    }

    /// Notes that its iterator is gone.
    pub(super) fn close(&self) {
        self.progress.lock().is_open = false;
    }

    /// A batch with padding was dropped without a look at what it counts; true once per loader.
    pub(super) fn claim_padding_warning(&self) -> bool {
        let cursor = self.cursor.upgrade();
        cursor.is_some_and(|cursor| cursor.0.lock().padding_warned.first())
    }

    /// Warns once per loader that the pass had no batch, unless it began at its end.
    pub(super) fn warn_empty(&self) {
        let EpochPosition { epoch, step, .. } = self.yielded();
        let cursor = self.cursor.upgrade().filter(|_| step == 0);
        if cursor.is_some_and(|cursor| cursor.0.lock().empty_warned.first()) {
            error::warn(&format!(
                "epoch {epoch} of a loader had no batches on rank 0, so that nothing was done in it: look at what its \
                 stream or sampler gives (reported once per loader)"
            ));
        }
    }

    fn progress(&self) -> Progress {
        *self.progress.lock()
    }
}

/// The place and the end of a batch, with its pass.
#[derive(Clone, Debug)]
pub(crate) struct ConsumeTicket {
    /// Its number among the loaders of the program.
    pub(super) loader: u64,
    pub(super) pass: Arc<EpochPass>,
    pub(super) end: EpochPosition,
}

impl ConsumeTicket {
    /// The same on every rank.
    pub(crate) fn position(&self) -> ReadPosition {
        ReadPosition {
            epoch: self.end.epoch,
            loader: self.loader,
            // It ends behind it.
            step: self.end.step - 1,
        }
    }

    /// Tells if it is of the same pass, so that the later one says all.
    pub(crate) fn follows(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.pass, &other.pass)
    }

    /// Tells if the program left the epoch of an earlier ticket before its end, and continued with this one's over the
    /// same loader. A second pass over one epoch continues it.
    pub(crate) fn leaves(&self, earlier: &Self) -> bool {
        let of_one_loader = Weak::ptr_eq(&self.pass.cursor, &earlier.pass.cursor);
        let before = earlier.pass.progress();
        of_one_loader
            && self.epoch() != earlier.epoch()
            && !before.is_open
            && !before.yielded.finished
    }

    pub(crate) fn epoch(&self) -> u64 {
        self.end.epoch
    }

    /// Gradients are made from its batch.
    pub(crate) fn begin(&self) {
        self.pass.progress.lock().trained.reach(self.end);
        let Some(cursor) = self.pass.cursor.upgrade() else {
            return;
        };
        let mut state = cursor.0.lock();
        state.begun = true;
        if let Some(first) = state.first_epoch.take() {
            warn_of_repeated_epoch(self.end.epoch, first);
        }
        // One whose last step is to come keeps the place.
        let waits = |pass: &Arc<EpochPass>| pass.progress().waits();
        if !state.current.as_ref().is_some_and(waits) {
            state.current = Some(self.pass.clone());
        }
    }

    /// Notes that its batch, and all before it in the pass, went into a step of that model.
    pub(crate) fn commit(&self, model: u64) {
        let is_new = self.pass.progress.lock().used.reach(self.end);
        let Some(cursor) = self.pass.cursor.upgrade() else {
            return;
        };
        let mut state = cursor.0.lock();
        state.resume = None;
        state.trained = true;
        let moves = match is_new {
            true => AdvancesCursor::To(self.epoch()),
            false => AdvancesCursor::No,
        };
        state.steppers.step(model, moves);
        state.current = Some(self.pass.clone());
    }
}

fn warn_of_repeated_epoch(epoch: u64, first: u64) {
    if epoch < first {
        error::warn(&format!(
            "epoch {epoch} is trained again: training was resumed from a checkpoint that continues with epoch {first}; \
             begin the loop there, `for epoch in position.epoch()..epochs`, with the position that `resume` returns \
             (reported once per loader)"
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spot(epoch: u64, step: u64) -> EpochPosition {
        EpochPosition {
            epoch,
            consumed: 10 * step,
            digest: None,
            finished: false,
            step,
        }
    }

    fn take(pass: &Arc<EpochPass>, step: u64) -> ConsumeTicket {
        let end = spot(pass.yielded().epoch, step);
        pass.advance(end);
        ConsumeTicket {
            loader: 0,
            pass: pass.clone(),
            end,
        }
    }

    fn step(ticket: &ConsumeTicket) {
        ticket.begin();
        ticket.commit(1);
    }

    #[test]
    fn what_is_trained_counts_and_what_is_only_yielded_does_not() {
        let cursor = Arc::new(Cursor::default());
        assert_eq!(cursor.position(), None);
        let pass = cursor.begin(4);
        step(&take(&pass, 1));
        take(&pass, 2);
        assert_eq!(cursor.position(), Some(spot(4, 1)));
        step(&take(&pass, 3));
        assert_eq!(cursor.position(), Some(spot(4, 3)));
        // A look at another epoch's first batch changes nothing.
        take(&cursor.begin(0), 1);
        assert_eq!(cursor.position(), Some(spot(4, 3)));
        pass.finish();
        assert_eq!(cursor.position().map(EpochPosition::next_epoch), Some(5));
    }

    #[test]
    fn what_no_step_came_of_comes_again() {
        let cursor = Arc::new(Cursor::default());
        let pass = cursor.begin(2);
        let first = take(&pass, 1);
        first.begin();
        assert_eq!(
            cursor.position(),
            Some(EpochPosition::start_of(2)),
            "the first step is to come"
        );
        first.commit(1);
        take(&pass, 2).begin();
        let last = take(&pass, 3);
        last.begin();
        assert_eq!(cursor.position(), Some(spot(2, 1)));
        pass.finish();
        assert_eq!(
            cursor.position(),
            Some(spot(2, 1)),
            "the last step of the epoch is to come"
        );
        // The next epoch begins before.
        let next = cursor.begin(3);
        let ahead = take(&next, 1);
        ahead.begin();
        assert_eq!(cursor.position(), Some(spot(2, 1)));
        // Of two models.
        last.commit(1);
        last.commit(2);
        assert_eq!(cursor.position().map(EpochPosition::next_epoch), Some(3));
    }

    /// Covers two models, one of which steps with a window later.
    #[test]
    fn a_step_with_earlier_batches_takes_nothing_back() {
        let cursor = Arc::new(Cursor::default());
        let pass = cursor.begin(0);
        let (early, late) = (take(&pass, 2), take(&pass, 3));
        late.begin();
        early.begin();
        late.commit(1);
        early.commit(1);
        assert_eq!(cursor.position(), Some(spot(0, 3)));
        pass.finish();
        assert_eq!(cursor.position().map(EpochPosition::next_epoch), Some(1));
    }

    #[test]
    fn an_epoch_that_was_left_gives_way_to_the_next() {
        let cursor = Arc::new(Cursor::default());
        let pass = cursor.begin(0);
        step(&take(&pass, 1));
        pass.close();
        assert_eq!(
            cursor.position(),
            Some(spot(0, 1)),
            "the loop was left, to continue"
        );
        let next = cursor.begin(1);
        take(&next, 1);
        assert_eq!(cursor.position(), Some(EpochPosition::start_of(1)));
    }

    #[test]
    fn in_evaluation_what_was_yielded_counts() {
        let cursor = Arc::new(Cursor::default());
        take(&cursor.begin(0), 2);
        assert_eq!(cursor.position(), Some(spot(0, 2)));
        assert!(!cursor.is_trained());
    }

    fn restored(position: EpochPosition, continues: bool) -> Arc<Cursor> {
        Cursor::restored(Restored {
            position: Some(position),
            steppers: Steppers::default(),
            trained: continues,
            continues,
            first_epoch: None,
        })
    }

    #[test]
    fn a_restored_place_holds_until_it_is_used() {
        let cursor = restored(spot(3, 7), true);
        assert_eq!(cursor.position(), Some(spot(3, 7)));
        assert_eq!(cursor.begin(0).yielded(), EpochPosition::start_of(0));
        assert_eq!(cursor.begin(3).yielded(), spot(3, 7), "a look");
        let pass = cursor.begin(3);
        assert_eq!(pass.yielded(), spot(3, 7));
        assert_eq!(cursor.position(), Some(spot(3, 7)));
        step(&take(&pass, 8));
        assert_eq!(cursor.begin(3).yielded(), EpochPosition::start_of(3));
    }

    #[test]
    fn a_restored_place_that_does_not_go_on_is_only_remembered() {
        let evaluation = restored(spot(0, 7), false);
        assert_eq!(evaluation.begin(0).yielded(), EpochPosition::start_of(0));
        let end = EpochPosition {
            finished: true,
            ..spot(2, 9)
        };
        let finished = restored(end, true);
        assert_eq!(finished.begin(2).yielded(), EpochPosition::start_of(2));
    }
}
