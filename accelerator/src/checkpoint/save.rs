use core::fmt;
use core::num::NonZeroUsize;
use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::Instant;

use accelerator_manifest::Draft;
use accelerator_track::RunMark;
use serde::{Deserialize, Serialize};

use super::parts::DynSave;
use super::saving::{BackgroundSave, CheckpointContext, Saved, Saving, from_main, none_begun};
use super::settings::{Checkpoints, FrozenParameters};
use super::snapshot::{Snapshot, SnapshotExchange, SnapshotMode, SnapshotReport, TakenSnapshot};
use super::state_file::LiveState;
use super::write::{self, JobInfo};
use crate::core::agreement::Failure;
use crate::core::error::{Error, Kind, Result};

#[track_caller]
pub(crate) fn save(
    context: &CheckpointContext,
    settings: &Checkpoints,
    parts: &dyn DynSave,
) -> Result<Saved> {
    let (draft, taken) = prepare_draft(context, settings, parts)?;
    let job = job(context, SnapshotMode::Regular);
    from_main(context, "save the checkpoint", || match draft {
        Some(draft) => write::write(draft, &taken, settings, job),
        None => Err(none_begun()),
    })
}

#[track_caller]
pub(crate) fn save_async(
    context: &Arc<CheckpointContext>,
    settings: Checkpoints,
    parts: &dyn DynSave,
) -> Result<Saving> {
    let (draft, taken) = prepare_draft(context, &settings, parts)?;
    let job = job(context, SnapshotMode::Regular);
    let work = match draft {
        Some(draft) => BackgroundSave::start(move || write::write(draft, &taken, &settings, job)),
        None => Arc::default(),
    };
    let watched: Weak<BackgroundSave> = Arc::downgrade(&work);
    context.trigger.watch(watched);
    context.begin(work.clone());
    Ok(Saving::new(context.clone(), work))
}

/// Takes the state of the group into the memory of rank 0. See [`Accelerator::regroup`].
#[track_caller]
pub(crate) fn keep(
    context: &CheckpointContext,
    parts: &dyn DynSave,
) -> Result<Option<Arc<LiveState>>> {
    let since = Instant::now();
    let frozen = FrozenParameters::Saved;
    let (_, taken) = prepare(context, Path::new(""), frozen, parts, || Ok(()))?;
    let job = job(context, SnapshotMode::Regular);
    let mut live = None;
    from_main(context, "take the state to the next group", || {
        live = Some(Arc::new(write::keep(&taken, &job, since)?));
        Ok(())
    })?;
    Ok(live)
}

pub(crate) fn save_emergency(
    context: &CheckpointContext,
    settings: &Checkpoints,
    parts: &dyn DynSave,
) -> Result<Option<Saved>> {
    let loss = sound_loss(context)?;
    let mut lost = context.group().lost();
    context.join();
    let writer = loop {
        let writer = (0..context.world_size()).find(|rank| !lost.contains(rank));
        let Some(other) = writer.filter(|rank| *rank != context.rank()) else {
            break writer;
        };
        // One that was dying a moment ago is not to be waited for.
        let later = context.group().lost();
        if !later.contains(&other) {
            break writer;
        }
        lost = later;
    };
    match writer {
        Some(writer) if writer == context.rank() => {}
        Some(_) => return Ok(None),
        None => {
            let message = format!("no rank is left to write the emergency checkpoint; {loss}");
            return Err(Error::new(Kind::Collective, message).with_source(loss));
        }
    }
    let taken = take_alone(context, settings.frozen, parts)?;
    taken.check_parts()?;
    let draft = write::begin(settings, context, SnapshotMode::Emergency)?;
    let job = job(context, SnapshotMode::Emergency);
    write::write(draft, &taken, settings, job).map(Some)
}

/// The state of a rank after its last complete step, which it brings into the next group after the loss of another
/// rank. See [`Accelerator::recover`](crate::Accelerator::recover).
pub(crate) struct SurvivorState {
    taken: TakenSnapshot,
    job: JobInfo,
    /// The rank under which the state holds this rank's own values.
    rank: usize,
    since: Instant,
    /// A text about the loss, for the run.
    recovery: Option<String>,
}

impl fmt::Debug for SurvivorState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SurvivorState")
            .field("step", &self.step())
            .finish_non_exhaustive()
    }
}

impl SurvivorState {
    /// Takes the state of this rank, without communication.
    pub(crate) fn take(context: &CheckpointContext, parts: &dyn DynSave) -> Result<Self> {
        if context.models.is_any_apart() {
            return Err(Error::misuse(
                "the ranks cannot continue without the lost one: they train apart, and what each has learned since the last \
                 average is only on that rank; resume from the last checkpoint",
            ));
        }
        let since = Instant::now();
        let taken = take_alone(context, FrozenParameters::Saved, parts).map_err(|error| {
            let message = "the ranks cannot continue without the lost one, which held part of the state; \
                resume from the last checkpoint";
            Error::misuse(message).with_source(error)
        })?;
        Ok(Self {
            taken,
            job: job(context, SnapshotMode::Regular),
            rank: context.rank(),
            since,
            recovery: None,
        })
    }

    /// Makes the next group resume from the state of its rank 0, to which all ranks add their own values. The other
    /// ranks keep their states until they have resumed, since rank 0 may be lost before then.
    ///
    /// Ranks differ by at most one step, since none ends a step without the others. Rank 0's step is the one that the
    /// program's run has logged.
    #[track_caller]
    pub(crate) fn bring_to(&mut self, next: &CheckpointContext) -> Result<()> {
        let (rank, ranks) = (next.rank(), next.world_size());
        self.taken.renumber(self.rank, rank, ranks);
        self.rank = rank;
        if ranks > 1 {
            let group = next.group().for_purpose("continue after a loss");
            let reports = group.all_gather_object(&self.taken.report(Path::new(""), rank))?;
            for (rank, report) in reports.iter().enumerate() {
                reports[0].compare_survivor(report, rank)?;
            }
            self.taken.complete(&reports);
            // All have the same parts, or rank 0 has none.
            if reports.iter().all(SnapshotReport::has_parts) {
                self.taken.gather(next.group())?;
            }
        }
        from_main(next, "continue after a loss", || {
            if self.taken.parts.is_empty() {
                return Ok(());
            }
            let live = write::keep(&self.taken, &self.job, self.since)?;
            next.go_on_from(Some(Arc::new(live)));
            Ok(())
        })
    }

    /// The number of optimizer steps after which it was taken.
    pub(crate) fn step(&self) -> u64 {
        self.taken.step()
    }

    /// Notes that this many ranks continue from it after a loss.
    pub(crate) fn note_recovery(&mut self, ranks: usize) {
        let (before, step) = (self.job.world_size.get(), self.step());
        let lost = before.saturating_sub(ranks);
        let text = format!("lost {lost} of {before} ranks; {ranks} continue after step {step}");
        self.recovery = Some(text);
    }

    /// Returns the text about the loss, and its step; `None` if no rank was lost.
    pub(crate) fn recovery(self) -> Option<(String, u64)> {
        let step = self.step();
        Some((self.recovery?, step))
    }

    /// The run at that step, as far as this rank knows it.
    pub(crate) fn run(&self) -> Option<&RunMark> {
        self.job.run.as_ref()
    }
}

/// Phase 1 of a save into a folder, in which rank 0 begins a draft.
#[track_caller]
fn prepare_draft(
    context: &CheckpointContext,
    settings: &Checkpoints,
    parts: &dyn DynSave,
) -> Result<(Option<Draft>, TakenSnapshot)> {
    let begin = || write::begin(settings, context, SnapshotMode::Regular);
    prepare(context, settings.path(), settings.frozen, parts, begin)
}

/// Phase 1: every rank takes its snapshot, and says whether it is ready, and with what. Only if all
/// are, and agree, does anyone continue: what lies on several ranks is brought together, and rank 0 has
/// begun.
#[track_caller]
fn prepare<T>(
    context: &CheckpointContext,
    folder: &Path,
    frozen: FrozenParameters,
    parts: &dyn DynSave,
    begin: impl FnOnce() -> Result<T>,
) -> Result<(Option<T>, TakenSnapshot)> {
    context.settle()?;
    let (rank, is_main) = (context.rank(), context.is_main_process());
    let mut snapshot = Snapshot::new(context, SnapshotMode::Regular, frozen);
    let collected = parts.collect(&mut snapshot);
    let mut taken = snapshot.taken;
    let complete = context.device_reducer.confirm();
    let complete = complete.and_then(|()| context.forward_collectives.check());
    let collected = collected.and_then(|()| taken.check_between_steps());
    let collected = collected.and_then(|()| taken.check_parts());
    let begun = complete.and(collected);
    let begun = begun.and_then(|()| is_main.then(begin).transpose());
    let mine = match &begun {
        Ok(_) => Vote::Ready(taken.report(folder, rank)),
        Err(error) => Vote::Failed(Failure::of(error)),
    };
    if context.world_size() == 1 {
        return Ok((begun?, taken));
    }
    let group = context.group().for_purpose("save a checkpoint");
    let votes = group.all_gather_object(&mine)?;
    let begun = begun?;
    let reports = count(votes)?;
    taken.complete(&reports);
    parts.settle(&mut SnapshotExchange::new(context, &mut taken))?;
    taken.gather(context.group())?;
    Ok((begun, taken))
}

#[derive(Deserialize, Serialize)]
enum Vote {
    Failed(Failure),
    Ready(SnapshotReport),
}

/// Returns every rank's report, if all are ready and agree. All ranks see the same votes, so all come to
/// the same.
fn count(votes: Vec<Vote>) -> Result<Vec<SnapshotReport>> {
    let mut reports: Vec<SnapshotReport> = Vec::with_capacity(votes.len());
    for (rank, vote) in votes.into_iter().enumerate() {
        match vote {
            Vote::Failed(failure) => return Err(failure.into_error(rank, "save a checkpoint")),
            Vote::Ready(report) => reports.push(report),
        }
    }
    SnapshotReport::compare_folders(&reports)?;
    for (rank, report) in reports.iter().enumerate() {
        reports[0].compare(report, rank)?;
    }
    Ok(reports)
}

/// Takes a snapshot of what this rank has after its last complete step.
fn take_alone(
    context: &CheckpointContext,
    frozen: FrozenParameters,
    parts: &dyn DynSave,
) -> Result<TakenSnapshot> {
    let mut snapshot = Snapshot::new(context, SnapshotMode::Emergency, frozen);
    parts.collect(&mut snapshot)?;
    Ok(snapshot.taken)
}

/// Returns the loss with which the group failed, on a rank that may continue after it. Waits for a save that the rank writes.
#[track_caller]
pub(crate) fn loss_to_survive(
    context: &CheckpointContext,
) -> Result<accelerator_collective::Error> {
    if !context.group().continues_on_loss() {
        return Err(loss(context)?.into());
    }
    let loss = sound_loss(context)?;
    context.join();
    Ok(loss)
}

/// Returns the loss with which the group failed, if the last step is known to be complete.
#[track_caller]
fn sound_loss(context: &CheckpointContext) -> Result<accelerator_collective::Error> {
    let loss = loss(context)?;
    if context.device_reducer.is_sound() {
        return Ok(loss);
    }
    let message = "the last step may have been taken with sums that the lost rank has left incomplete on \
        the GPUs, so it is not kept: continue from the last checkpoint";
    Err(Error::new(Kind::Collective, message).with_source(loss))
}

/// The loss with which the group failed. In a group that failed, nothing is sent.
#[track_caller]
fn loss(context: &CheckpointContext) -> Result<accelerator_collective::Error> {
    match context.group().barrier() {
        Err(error) if error.is_peer_lost() => Ok(error),
        Err(error) => Err(error.into()),
        Ok(()) => Err(Error::misuse(
            "`save_emergency` and `recover` are for the survivors of a lost rank, and no rank is lost: \
             use `save_state` or `regroup`",
        )),
    }
}

fn job(context: &CheckpointContext, mode: SnapshotMode) -> JobInfo {
    JobInfo {
        activity: context.group().activity(),
        factor: context.factor(),
        mode,
        run: context.tracking.mark(),
        seed: context.seed,
        tracking: context.tracking.clone(),
        world_size: NonZeroUsize::new(context.world_size()).unwrap_or(NonZeroUsize::MIN),
    }
}
