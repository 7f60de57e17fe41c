//! Slots: what trials run on, dealt from the cores and GPUs of the hosts.

use std::ops::{Index, IndexMut};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::config::TrialId;
use crate::error::{Error, Result};
use crate::host::{HostResources, ProcessProgram, ProcessSpec};

/// The resources of one trial: Ray Tune's `resources_per_trial`.
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
    /// Cores. The trial and the processes that it starts are bound to them, and get their number as `RAYON_NUM_THREADS`
    /// and `OMP_NUM_THREADS` unless these are set. With less than 1, trials share a core. If a CPU quota grants the
    /// search fewer cores than its affinity, there are only as many slots as the quota allows, and trials are not
    /// bound: the system chooses the cores.
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

#[derive(Debug)]
pub(crate) struct Slots {
    slots: Vec<Slot>,
    resources: Resources,
    cores: usize,
    gpus: usize,
}

/// The share of a host on which one trial computes at a time.
#[derive(Debug, Default)]
pub(crate) struct Slot {
    pub(crate) host: usize,
    /// The number of threads that may compute at a time.
    pub(crate) threads: usize,
    /// The cores to which trials are bound; empty if the system has to choose.
    pub(crate) cores: Vec<usize>,
    pub(crate) gpus: Vec<String>,
    pub(crate) active: Option<TrialId>,
}

impl Slots {
    /// Makes as many slots as fit on each host, or `count` in all.
    pub(crate) fn new(
        resources: &Resources,
        count: Option<usize>,
        hosts: &[&HostResources],
    ) -> Result<Self> {
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
        let fits = |host: &HostResources| {
            let by_cores = whole(host.cores, cpus).max(1);
            match gpus > 0.0 {
                true => by_cores.min(whole(host.gpus.len(), gpus)),
                false => by_cores,
            }
        };
        let fitting = hosts.iter().map(|host| fits(host));
        let fitting = fitting.fold(0, usize::saturating_add);
        let most = |of: fn(&HostResources) -> usize| hosts.iter().map(|host| of(host)).max();
        if fitting == 0 {
            return Err(wrong(format!(
                "a trial takes {gpus} GPUs, and this process sees {}; see `accel-launch env`",
                most(|host| host.gpus.len()).unwrap_or(0)
            )));
        }
        let cores = most(|host| host.cores).unwrap_or(0);
        if whole(cores, cpus) == 0 && count.is_none() {
            tracing::warn!(
                "a trial takes {cpus} cores, and this process has {cores}: one trial runs at a time, on all of them"
            );
        }
        let asked = count.unwrap_or(fitting);
        if asked > MOST_SLOTS {
            return Err(Error::misuse(format!(
                "there would be {asked} slots, by `slots` or by `resources_per_trial`; there are at most {MOST_SLOTS}"
            )));
        }
        let dealt = |host: usize| match count {
            Some(count) => count * (host + 1) / hosts.len() - count * host / hosts.len(),
            None => fits(hosts[host]),
        };
        let slots = hosts.iter().enumerate().flat_map(|(number, host)| {
            (0..dealt(number)).map(move |slot| Slot {
                host: number,
                threads: integer(cpus.ceil()).min(host.cores).max(1),
                cores: share(&host.core_numbers, slot, cpus),
                gpus: share(&host.gpus, slot, gpus),
                ..Slot::default()
            })
        });
        Ok(Self {
            slots: slots.collect(),
            resources: resources.clone(),
            cores: hosts.iter().map(|host| host.cores).sum(),
            gpus: hosts.iter().map(|host| host.gpus.len()).sum(),
        })
    }

    pub(crate) fn len(&self) -> usize {
        self.slots.len()
    }

    pub(crate) fn have_gpus(&self) -> bool {
        self.resources.gpus > 0.0
    }

    pub(crate) fn free(&self) -> Option<usize> {
        self.slots.iter().position(|slot| slot.active.is_none())
    }

    /// Returns the resources in use and in all, such as `2.0/2 CPUs, 0.0/0 GPUs`.
    pub(crate) fn requested(&self) -> String {
        let used = self.slots.iter().filter(|slot| slot.active.is_some());
        let used = float(used.count());
        format!(
            "{:.1}/{} CPUs, {:.1}/{} GPUs",
            used * self.resources.cpus,
            self.cores,
            used * self.resources.gpus,
            self.gpus
        )
    }
}

impl Slot {
    pub(crate) fn process(
        &self,
        program: ProcessProgram,
        ranks: usize,
        log: PathBuf,
    ) -> ProcessSpec {
        ProcessSpec {
            program,
            ranks,
            threads: self.threads,
            cores: self.cores.clone(),
            gpus: self.gpus.clone(),
            log,
        }
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

/// The maximum number of slots: no machine runs more processes.
const MOST_SLOTS: usize = 1 << 16;

/// Returns how often `each` goes into `all`.
fn whole(all: usize, each: f64) -> usize {
    integer((float(all) / each + 1e-9).floor())
}

/// Returns a slot's share of `all`, if each slot has `each`; slots share if there are too many. Of the last core or GPU, a
/// trial may use only a part.
fn share<T: Clone>(all: &[T], slot: usize, each: f64) -> Vec<T> {
    if all.is_empty() || each == 0.0 {
        return Vec::new();
    }
    let first = integer((float(slot) * each + 1e-9).floor());
    let count = integer(each.ceil()).min(all.len());
    let indices = (first..first + count).map(|index| index % all.len());
    indices.map(|index| all[index].clone()).collect()
}

#[expect(
    clippy::cast_precision_loss,
    reason = "a number of slots, cores or GPUs"
)]
fn float(count: usize) -> f64 {
    count as f64
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a number of cores or GPUs"
)]
fn integer(count: f64) -> usize {
    count as usize
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

    fn host(cores: usize) -> HostResources {
        HostResources {
            cores,
            ..HostResources::default()
        }
    }

    fn cpus(cpus: f64) -> Resources {
        Resources {
            cpus,
            ..Resources::default()
        }
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
            let error = Slots::new(&resources, None, &[&host(2)]).unwrap_err();
            assert!(error.is_misuse(), "{error}");
        }
    }

    #[test]
    fn slots_are_as_many_as_a_quota_grants_and_the_system_chooses_their_cores() {
        for (each, expected) in [(1.0, [1; 4].as_slice()), (2.0, &[2; 2]), (9.0, &[4])] {
            let slots = Slots::new(&cpus(each), None, &[&host(4)]).unwrap().slots;
            let threads: Vec<_> = slots.iter().map(|slot| slot.threads).collect();
            assert_eq!(threads, expected);
            assert!(slots.iter().all(|slot| slot.cores.is_empty()));
        }
    }

    #[test]
    fn slots_are_on_hosts_by_what_they_have() {
        let hosts = [4, 2].map(|cores| HostResources {
            core_numbers: (0..cores).collect(),
            ..host(cores)
        });
        let hosts: Vec<_> = hosts.iter().collect();
        let on = |each: f64, count: Option<usize>| -> Vec<(usize, Vec<usize>)> {
            let slots = Slots::new(&cpus(each), count, &hosts).unwrap().slots;
            let places = slots.into_iter().map(|slot| (slot.host, slot.cores));
            places.collect()
        };
        let (two, last) = (vec![0, 1], vec![2, 3]);
        assert_eq!(
            on(2.0, None),
            [(0, two.clone()), (0, last), (1, two.clone())]
        );
        assert_eq!(on(2.0, Some(2)), [(0, two.clone()), (1, two)]);
        assert_eq!(on(1.0, Some(1)), [(1, vec![0])]);
        assert!(Slots::new(&cpus(1.0), Some(usize::MAX), &hosts).is_err());
    }
}
