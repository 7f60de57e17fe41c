//! Checks that the parameters are bit-identical on every rank. The run records their digest.

use core::num::NonZeroU64;
use std::collections::HashSet;

use burn::module::ParamId;

use crate::core::agreement::short;
use crate::core::dyn_module::DynModule;
use crate::core::error::{Error, Kind, Result};
use crate::core::module::visit_floats;
use crate::core::partition::piece_of;
use crate::core::tensor::any_rank;
use crate::model::{running_states, sync_buffers};
use crate::reduce::{ModelState, ReduceContext};
use crate::tracking::Tracking;

const CHECK: &str = "check_replicas";
const SHOWN: usize = 3;

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum ComparedParameters {
    All,
    Trainable,
}

#[track_caller]
pub(crate) fn check_all(
    context: &ReduceContext,
    tracking: &Tracking,
    model: &dyn DynModule,
) -> Result<()> {
    let model_state = context.models.find(model)?;
    check(
        context,
        tracking,
        CHECK,
        &model_state,
        model,
        ComparedParameters::All,
    )
}

/// Checks the model where it is time for it; called by all ranks as a window ends, before the
/// step that this window is for.
#[track_caller]
pub(crate) fn check_when_due(
    context: &ReduceContext,
    tracking: &Tracking,
    model_state: &ModelState,
    model: &dyn DynModule,
) -> Result<()> {
    if is_due(context.settings.check_replicas, model_state.steps()) {
        check(
            context,
            tracking,
            CHECK,
            model_state,
            model,
            ComparedParameters::Trainable,
        )
    } else {
        Ok(())
    }
}

/// Compares the parameters and averages the running statistics. All ranks call it, before what they have becomes a
/// result.
///
/// A model that was not prepared is each program's own affair.
#[track_caller]
pub(crate) fn check_and_sync(
    context: &ReduceContext,
    tracking: &Tracking,
    action: &str,
    model: &dyn DynModule,
) -> Result<()> {
    if let Ok(model_state) = context.models.find(model) {
        model_state.note_compared();
        model_state.round().check_together(action)?;
        check(
            context,
            tracking,
            action,
            &model_state,
            model,
            ComparedParameters::Trainable,
        )?;
    }
    sync_buffers(context, model)
}

fn is_due(every: Option<NonZeroU64>, steps: u64) -> bool {
    every.is_some_and(|every| steps > 0 && steps % every == 0)
}

#[track_caller]
fn check(
    context: &ReduceContext,
    tracking: &Tracking,
    action: &str,
    model_state: &ModelState,
    model: &dyn DynModule,
    compared: ComparedParameters,
) -> Result<()> {
    let group = context.group();
    let is_alone = group.world_size() == 1;
    if is_alone && !tracking.writes() {
        return Ok(());
    }
    context.check_forward()?;
    let mine = ReplicaDigest::of(model, model_state, compared);
    if !is_alone {
        compare(context, action, &mine)?;
    }
    tracking.weights(mine.digest.to_hex().as_str());
    Ok(())
}

#[track_caller]
fn compare(context: &ReduceContext, action: &str, mine: &ReplicaDigest) -> Result<()> {
    let checking = context.group().for_purpose(action);
    let digests = checking.all_gather::<u8>(mine.digest.as_bytes())?;
    let mut digests = digests.chunks_exact(blake3::OUT_LEN);
    let first = digests.next();
    if digests.all(|digest| Some(digest) == first) {
        return Ok(());
    }
    // All ranks saw the same digests, so all of them come here.
    let ranks = checking.all_gather_object(&mine.parameters)?;
    Err(Error::new(
        Kind::Drift,
        Drift::of(&ranks).describe(&mine.paths),
    ))
}

struct ReplicaDigest {
    digest: blake3::Hash,
    /// Eight bytes of the digest of each.
    parameters: Vec<u64>,
    paths: Vec<String>,
}

impl ReplicaDigest {
    fn of(model: &dyn DynModule, model_state: &ModelState, compared: ComparedParameters) -> Self {
        let known = model_state.parameters().iter().map(|known| known.id);
        let known: HashSet<ParamId> = known.collect();
        let running = match compared {
            ComparedParameters::All => running_states(model),
            ComparedParameters::Trainable => HashSet::new(),
        };
        let mut all = blake3::Hasher::new();
        let (mut parameters, mut paths) = (Vec::new(), Vec::new());
        visit_floats(model, |float| {
            // Each rank has a different piece, so there is nothing to compare.
            if piece_of(float.id).is_some_and(|piece| piece.partition.is_divided()) {
                return;
            }
            let is_compared = match compared {
                ComparedParameters::All => !running.contains(&float.place),
                ComparedParameters::Trainable => known.contains(&float.id),
            };
            if is_compared {
                let hash = blake3::hash(any_rank(&float.value).into_data().bytes());
                all.update(hash.as_bytes());
                parameters.push(short(&hash));
                paths.push(float.path.to_owned());
            }
        });
        Self {
            digest: all.finalize(),
            parameters,
            paths,
        }
    }
}

#[derive(Debug, Eq, PartialEq)]
struct Drift {
    ranks: usize,
    /// The ranks that differ from the majority; all if there is none.
    deviating: Vec<usize>,
    parameters: Vec<usize>,
}

impl Drift {
    fn of(ranks: &[Vec<u64>]) -> Self {
        let votes = |hashes: &Vec<u64>| ranks.iter().filter(|other| *other == hashes).count();
        let majority = ranks.iter().find(|hashes| votes(hashes) * 2 > ranks.len());
        let deviating = (0..ranks.len()).filter(|&rank| Some(&ranks[rank]) != majority);
        let count = ranks.iter().map(Vec::len).max().unwrap_or(0);
        let differs = |at: &usize| {
            ranks
                .iter()
                .any(|hashes| hashes.get(*at) != ranks[0].get(*at))
        };
        Self {
            ranks: ranks.len(),
            deviating: deviating.collect(),
            parameters: (0..count).filter(differs).collect(),
        }
    }

    fn describe(&self, paths: &[String]) -> String {
        let named: Vec<_> = self.deviating.iter().map(usize::to_string).collect();
        let (who, verb) = match &named[..] {
            [one] => (format!("rank {one}"), "differs"),
            [rest @ .., last] if !rest.is_empty() => {
                (format!("ranks {} and {last}", rest.join(", ")), "differ")
            }
            _ => ("no rank".to_owned(), "differs"),
        };
        let from = match self.ranks - self.deviating.len() {
            0 => "from each other, and no value has a majority".to_owned(),
            others => format!("from the other {others}"),
        };
        let count = self.parameters.len();
        let shown: Vec<_> = self
            .parameters
            .iter()
            .take(SHOWN)
            .map(|&at| match paths.get(at) {
                Some(path) => format!("`{path}`"),
                None => format!("number {at}"),
            })
            .collect();
        let more = if count > SHOWN { ", …" } else { "" };
        format!(
            "the parameters are no longer the same on every rank: {who} {verb} {from}, in {count} \
             of {}, first in {}{more}; look for code that changes parameters on some ranks only, such as \
             an optimizer step without the gradients of `accelerator.backward`, or with another \
             learning rate, and continue from a checkpoint",
            paths.len(),
            shown.join(", ")
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn described(ranks: &[&[u64]]) -> String {
        let ranks: Vec<Vec<u64>> = ranks.iter().map(|hashes| hashes.to_vec()).collect();
        let paths: Vec<_> = ["a", "b", "c"]
            .iter()
            .map(|&path| path.to_owned())
            .collect();
        Drift::of(&ranks).describe(&paths)
    }

    #[test]
    fn the_majority_is_right() {
        let text = described(&[&[1, 2, 3], &[1, 2, 3], &[1, 9, 9], &[1, 2, 3]]);
        assert!(
            text.contains("rank 2 differs from the other 3, in 2 of 3, first in `b`, `c`;"),
            "{text}"
        );
        let text = described(&[&[1, 9, 3], &[1, 2, 3], &[8, 2, 3], &[1, 2, 3], &[1, 2, 3]]);
        assert!(text.contains("ranks 0 and 2 differ from the other 3, in 2 of 3, first in `a`"));
    }

    #[test]
    fn without_a_majority_all_are_named() {
        for ranks in [
            &[&[1, 2, 3][..], &[1, 2, 4][..]][..],
            &[&[1, 2, 3], &[1, 2, 4], &[1, 2, 3], &[1, 2, 4]],
            &[&[1, 2, 3], &[1, 2, 4], &[1, 2, 5]],
        ] {
            let text = described(ranks);
            let last = ranks.len() - 1;
            assert!(
                text.contains(&format!(" and {last} differ from each other")),
                "{text}"
            );
            assert!(
                text.contains("ranks 0") && text.contains("first in `c`;"),
                "{text}"
            );
        }
    }

    #[test]
    fn every_so_many_steps_but_not_before_the_first_step() {
        let due = |every| (0..8).filter(move |&steps| is_due(every, steps));
        assert!(due(NonZeroU64::new(3)).eq([3, 6]));
        assert_eq!(due(None).count(), 0);
    }
}
