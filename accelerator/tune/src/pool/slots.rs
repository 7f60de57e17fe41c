use std::collections::VecDeque;
use std::ops::{Index, IndexMut};
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::Turn;
use crate::error::{Error, Result};
use crate::trial_id::TrialId;

/// What one trial runs on: Ray Tune's `resources_per_trial`.
///
/// ```
/// use accelerator_tune::Resources;
///
/// // Two trials share a GPU.
/// let resources = Resources { cpus: 2.0, gpus: 0.5, ..Resources::default() };
/// assert_eq!(resources.processes, 1);
/// ```
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Resources {
    /// Cores. The trial's threads are bound to them, and there are as many of them. Less than 1 shares a core.
    #[serde(alias = "cpu")]
    pub cpus: f64,
    /// GPUs, which `CUDA_VISIBLE_DEVICES` names; 0 hides them all. A fraction shares one with other trials, whose memory is
    /// not kept apart.
    #[serde(alias = "gpu")]
    pub gpus: f64,
    /// Processes. More than one are the ranks of a group, as `accel-launch --num-processes` starts them.
    pub processes: usize,
}

impl Default for Resources {
    fn default() -> Self {
        Self {
            cpus: 1.0,
            gpus: 0.0,
            processes: 1,
        }
    }
}

/// What trials run on.
#[derive(Debug)]
pub(crate) struct Slots {
    slots: Vec<Slot>,
    resources: Resources,
    cores: usize,
    gpus: usize,
}

/// What one trial computes on at a time.
#[derive(Debug, Default)]
pub(crate) struct Slot {
    pub(crate) cores: Vec<usize>,
    pub(crate) gpus: Vec<String>,
    /// How many trials take turns.
    pub(crate) trials: usize,
    /// The one that computes.
    pub(crate) active: Option<TrialId>,
    pub(super) turns: VecDeque<Turn>,
}

impl Slots {
    /// As many as fit, or `count`.
    pub(crate) fn new(resources: &Resources, count: Option<usize>) -> Result<Self> {
        let Resources {
            cpus,
            gpus,
            processes,
        } = *resources;
        let wrong = |what: String| Error::misuse(format!("`resources_per_trial`: {what}"));
        if !(cpus > 0.0 && cpus.is_finite()) {
            return Err(wrong(format!("`cpus` is {cpus}; it is above 0")));
        }
        if !(gpus >= 0.0 && gpus.is_finite() && (gpus < 1.0 || gpus.fract() == 0.0)) {
            return Err(wrong(format!(
                "`gpus` is {gpus}; it is a fraction of one, or a whole number"
            )));
        }
        if processes == 0 {
            return Err(wrong("`processes` is 0; it is at least 1".to_owned()));
        }
        if count == Some(0) {
            return Err(Error::misuse("`slots` is 0; it is at least 1"));
        }
        let all_cores = usable_cores();
        let all_gpus = visible_gpus();
        let by_cores = whole(all_cores.len(), cpus);
        let fitting = match gpus > 0.0 {
            true => by_cores.max(1).min(whole(all_gpus.len(), gpus)),
            false => by_cores.max(1),
        };
        if gpus > 0.0 && whole(all_gpus.len(), gpus) == 0 {
            return Err(wrong(format!(
                "a trial takes {gpus} GPUs, and this process sees {}; see `accel-launch env`",
                all_gpus.len()
            )));
        }
        if by_cores == 0 && count.is_none() {
            tracing::warn!(
                "a trial takes {cpus} cores, and this process has {}: one trial runs at a time, on all of them",
                all_cores.len()
            );
        }
        let count = count.unwrap_or(fitting);
        if count > MOST_SLOTS {
            return Err(Error::misuse(format!(
                "there would be {count} slots, by `slots` or by `resources_per_trial`; there are at most {MOST_SLOTS}"
            )));
        }
        let slots = (0..count).map(|slot| Slot {
            cores: share(&all_cores, slot, cpus),
            gpus: share(&all_gpus, slot, gpus),
            ..Slot::default()
        });
        Ok(Self {
            slots: slots.collect(),
            resources: resources.clone(),
            cores: all_cores.len(),
            gpus: all_gpus.len(),
        })
    }

    pub(crate) fn len(&self) -> usize {
        self.slots.len()
    }

    pub(crate) fn have_gpus(&self) -> bool {
        self.resources.gpus > 0.0
    }

    /// A slot on which nothing computes.
    pub(crate) fn free(&self) -> Option<usize> {
        self.slots.iter().position(|slot| slot.active.is_none())
    }

    /// The slot with the fewest trials.
    pub(crate) fn least_used(&self) -> usize {
        let slots = self.slots.iter().enumerate();
        slots
            .min_by_key(|(_, slot)| slot.trials)
            .map_or(0, |(index, _)| index)
    }

    /// Such as `2.0/2 CPUs, 0.0/0 GPUs`.
    pub(crate) fn requested(&self) -> String {
        let used = self
            .slots
            .iter()
            .filter(|slot| slot.active.is_some())
            .count();
        #[expect(clippy::cast_precision_loss, reason = "a few slots")]
        let used = used as f64;
        format!(
            "{:.1}/{} CPUs, {:.1}/{} GPUs",
            used * self.resources.cpus,
            self.cores,
            used * self.resources.gpus,
            self.gpus
        )
    }
}

impl Index<usize> for Slots {
    type Output = Slot;

    fn index(&self, slot: usize) -> &Slot {
        &self.slots[slot]
    }
}

impl IndexMut<usize> for Slots {
    fn index_mut(&mut self, slot: usize) -> &mut Slot {
        &mut self.slots[slot]
    }
}

/// More processes are none that a machine runs.
const MOST_SLOTS: usize = 1 << 16;

/// How often `each` goes into `all`.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "numbers of cores and GPUs"
)]
fn whole(all: usize, each: f64) -> usize {
    (all as f64 / each + 1e-9).floor() as usize
}

/// What a slot has of all, where each has so much; slots share where there are too many.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "numbers of cores and GPUs"
)]
fn share<T: Clone>(all: &[T], slot: usize, each: f64) -> Vec<T> {
    if all.is_empty() || each == 0.0 {
        return Vec::new();
    }
    let first = (slot as f64 * each + 1e-9).floor() as usize;
    let count = (each.ceil() as usize).min(all.len());
    let indices = (first..first + count).map(|index| index % all.len());
    indices.map(|index| all[index].clone()).collect()
}

#[cfg(target_os = "linux")]
fn usable_cores() -> Vec<usize> {
    match rustix::thread::sched_getaffinity(None) {
        Ok(set) => (0..rustix::thread::CpuSet::MAX_CPU)
            .filter(|core| set.is_set(*core))
            .collect(),
        Err(_) => Vec::new(),
    }
}

#[cfg(not(target_os = "linux"))]
fn usable_cores() -> Vec<usize> {
    let count = std::thread::available_parallelism().map_or(1, std::num::NonZeroUsize::get);
    (0..count).collect()
}

/// Those of `CUDA_VISIBLE_DEVICES`, or all of the machine.
fn visible_gpus() -> Vec<String> {
    if let Ok(list) = std::env::var("CUDA_VISIBLE_DEVICES") {
        let listed = list.split(',').map(str::trim).filter(|id| !id.is_empty());
        return listed.map(str::to_owned).collect();
    }
    let devices = Path::new("/proc/driver/nvidia/gpus").read_dir();
    let count = devices.map_or(0, Iterator::count);
    (0..count).map(|index| index.to_string()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_share_what_there_is() {
        let all = [0, 1, 2, 3];
        assert_eq!(share(&all, 0, 2.0), [0, 1]);
        assert_eq!(share(&all, 1, 2.0), [2, 3]);
        assert_eq!(share(&all, 2, 2.0), [0, 1]);
        assert_eq!(share(&all, 1, 0.5), [0]);
        assert_eq!(share(&all, 2, 0.5), [1]);
        assert_eq!(share(&all, 0, 9.0), [0, 1, 2, 3]);
        assert_eq!(share(&all, 0, 0.0), [0; 0]);
        assert_eq!((whole(4, 0.5), whole(4, 3.0), whole(1, 2.0)), (8, 1, 0));
    }

    #[test]
    fn resources_that_cannot_be_are_refused() {
        for (cpus, gpus, processes) in [
            (0.0, 0.0, 1),
            (f64::NAN, 0.0, 1),
            (1.0, 1.5, 1),
            (1.0, -1.0, 1),
            (1.0, 0.0, 0),
            (1e-300, 0.0, 1),
        ] {
            let resources = Resources {
                cpus,
                gpus,
                processes,
            };
            let error = Slots::new(&resources, None).unwrap_err();
            assert!(error.is_misuse(), "{error}");
        }
        assert_eq!(Slots::new(&Resources::default(), Some(4)).unwrap().len(), 4);
        assert!(Slots::new(&Resources::default(), Some(usize::MAX)).is_err());
    }
}
