//! The GPUs that the ranks of a launch see, and the one that each takes.
//!
//! The launcher gives all ranks of this host the same list, and each takes the device of its local rank. It
//! does not know what the program computes on: whether there are enough devices is for the ranks to
//! say, and for the launcher only if the user has named them.

use std::ffi::{OsStr, OsString};

use crate::error::{Error, Result};
use crate::gpu::{GpuId, GpuIds, VISIBLE, Visible, joined, shown};
use crate::settings::options::Options;

/// The variable that sets the order in which CUDA numbers devices.
const ORDER: &str = "CUDA_DEVICE_ORDER";

/// The variable that lets ranks share GPUs.
const OVERSUBSCRIBE: &str = accelerator_host::OVERSUBSCRIBE_GPUS.name;

#[derive(Clone, Debug)]
pub(crate) struct Gpus {
    /// The GPUs that ranks see, as far as they are known.
    visible: Visible,
    /// The rule for two ranks that take the same one.
    sharing: Sharing,
    /// The variables of ranks.
    variables: Vec<(&'static str, OsString)>,
    /// The rows of the table of settings: name, value and origin.
    rows: Vec<[String; 3]>,
}

/// The rule for more ranks than GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sharing {
    Refused,
    Allowed,
}

impl Gpus {
    /// Selects the GPUs that `options` ask for, among those that the environment allows; `lookup` reads it.
    ///
    /// # Errors
    /// For ids that the environment hides, and for more ranks than ids if GPUs are not shared.
    pub(crate) fn resolve(
        options: &Options,
        lookup: impl Fn(&str) -> Option<OsString>,
    ) -> Result<Self> {
        let inherited = lookup(VISIBLE);
        let (sharing, sharing_origin) = match lookup(OVERSUBSCRIBE) {
            _ if options.oversubscribe_gpus => (Sharing::Allowed, "--oversubscribe-gpus"),
            Some(value) if accelerator_host::switch(&value.to_string_lossy()) == Some(true) => {
                (Sharing::Allowed, OVERSUBSCRIBE)
            }
            Some(value) if !value.is_empty() => (Sharing::Refused, OVERSUBSCRIBE),
            _ => (Sharing::Refused, "default"),
        };
        let mut gpus = Self {
            visible: Visible::of(inherited.as_deref()),
            sharing,
            variables: Vec::new(),
            rows: Vec::new(),
        };
        match &options.gpu_ids {
            Some(GpuIds::Listed(ids)) => {
                let ranks = options.processes().most.get();
                gpus.select(ids, ranks, inherited.as_deref(), &lookup)?;
            }
            all => gpus.leave(all.is_some(), inherited.as_deref()),
        }
        if options.oversubscribe_gpus {
            gpus.variables.push((OVERSUBSCRIBE, "1".into()));
        }
        gpus.row(
            "GPU sharing",
            match sharing {
                Sharing::Refused => "refused",
                Sharing::Allowed => "allowed",
            },
            sharing_origin,
        );
        Ok(gpus)
    }

    /// Returns the variables that ranks get beyond those that they inherit.
    pub(crate) fn variables(&self) -> &[(&'static str, OsString)] {
        &self.variables
    }

    /// Returns the rows of the table of settings: name, value and origin.
    pub(crate) fn rows(&self) -> &[[String; 3]] {
        &self.rows
    }

    /// The GPU that this local rank takes if it computes on one; `None` if that is not known here.
    pub(crate) fn of(&self, rank: usize) -> Option<&GpuId> {
        let Visible::Listed(ids) = &self.visible else {
            return None;
        };
        match self.sharing {
            Sharing::Refused => ids.get(rank),
            Sharing::Allowed => ids.get(rank.checked_rem(ids.len())?),
        }
    }

    /// The ranks see the GPUs that they would see anyway.
    fn leave(&mut self, is_asked: bool, inherited: Option<&OsStr>) {
        match inherited {
            Some(value) => self.row("GPUs", shown(value), VISIBLE),
            None if is_asked => self.row("GPUs", "all", "--gpu-ids"),
            None => self.row("GPUs", "all", "default"),
        }
    }

    /// The ranks see these and no others.
    fn select(
        &mut self,
        ids: &[GpuId],
        ranks: usize,
        inherited: Option<&OsStr>,
        lookup: impl Fn(&str) -> Option<OsString>,
    ) -> Result<()> {
        let chosen = self.visible.select(ids)?;
        let text = joined(&chosen);
        if ranks > chosen.len() && self.sharing == Sharing::Refused {
            let count = chosen.len();
            let noun = if count == 1 { "GPU" } else { "GPUs" };
            return Err(Error::usage(format!(
                "{ranks} ranks are to be started on this host, and --gpu-ids names {count} \
                 {noun} ({}): start at most {count}, name more, or let ranks share GPUs by \
                 --oversubscribe-gpus",
                joined(ids)
            )));
        }
        let origin = match inherited {
            Some(value) => format!(
                "--gpu-ids {} of {VISIBLE}={}",
                joined(ids),
                value.to_string_lossy()
            ),
            None => "--gpu-ids".to_owned(),
        };
        self.row("GPUs", &text, origin);
        self.variables.push((VISIBLE, text.into()));
        // Numbers that nothing has given a meaning are those that nvidia-smi and `accel-launch env` show;
        // CUDA's own order begins with the fastest device.
        let has_numbers = ids.iter().any(|id| matches!(id, GpuId::Number(_)));
        if has_numbers && inherited.is_none() && lookup(ORDER).is_none() {
            self.row(ORDER, "PCI_BUS_ID", "default: ids are nvidia-smi's");
            self.variables.push((ORDER, "PCI_BUS_ID".into()));
        }
        self.visible = Visible::Listed(chosen);
        Ok(())
    }

    fn row(&mut self, name: &str, value: impl Into<String>, origin: impl Into<String>) {
        self.rows
            .push([name.to_owned(), value.into(), origin.into()]);
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use super::*;
    use crate::settings::options::Processes;

    fn options(ids: &str, ranks: usize) -> Options {
        Options {
            gpu_ids: Some(ids.parse().unwrap()),
            num_processes: NonZeroUsize::new(ranks).map(Processes::exactly),
            ..Options::default()
        }
    }

    fn resolved(options: &Options, set: &[(&str, &str)]) -> Result<Gpus> {
        Gpus::resolve(options, |name| {
            let found = set.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| value.into())
        })
    }

    fn variable(gpus: &Gpus, name: &str) -> Option<String> {
        let found = gpus.variables().iter().find(|(known, _)| *known == name);
        found.map(|(_, value)| value.to_string_lossy().into_owned())
    }

    fn taken(gpus: &Gpus, ranks: usize) -> Vec<Option<String>> {
        (0..ranks)
            .map(|rank| gpus.of(rank).map(GpuId::to_string))
            .collect()
    }

    #[test]
    fn ranks_see_what_was_named_and_take_it_in_order() {
        let gpus = resolved(&options("2,0", 2), &[]).unwrap();
        assert_eq!(variable(&gpus, VISIBLE).as_deref(), Some("2,0"));
        assert_eq!(variable(&gpus, ORDER).as_deref(), Some("PCI_BUS_ID"));
        assert_eq!(taken(&gpus, 2), [Some("2".into()), Some("0".into())]);
        assert_eq!(variable(&gpus, OVERSUBSCRIBE), None);
    }

    #[test]
    fn ids_count_within_what_is_visible_already() {
        let set = [(VISIBLE, "4,GPU-5a,6")];
        let gpus = resolved(&options("1,2", 2), &set).unwrap();
        assert_eq!(variable(&gpus, VISIBLE).as_deref(), Some("GPU-5a,6"));
        // Whoever set the variable meant its numbers in an order that stays.
        assert_eq!(variable(&gpus, ORDER), None);
        assert_eq!(
            gpus.rows()[0],
            [
                "GPUs",
                "GPU-5a,6",
                "--gpu-ids 1,2 of CUDA_VISIBLE_DEVICES=4,GPU-5a,6"
            ]
        );
        let set = [(ORDER, "FASTEST_FIRST")];
        let gpus = resolved(&options("1", 1), &set).unwrap();
        assert_eq!(variable(&gpus, ORDER), None);
    }

    #[test]
    fn all_leaves_the_environment_alone() {
        for (options, set, value, origin) in [
            (Options::default(), &[][..], "all", "default"),
            (options("all", 9), &[], "all", "--gpu-ids"),
            (options("all", 9), &[(VISIBLE, "4,5")], "4,5", VISIBLE),
        ] {
            let gpus = resolved(&options, set).unwrap();
            assert!(gpus.variables().is_empty());
            assert_eq!(gpus.rows()[0], ["GPUs", value, origin]);
        }
        let hidden = resolved(&Options::default(), &[(VISIBLE, "")]).unwrap();
        assert!(hidden.rows()[0][1].starts_with("none"));
        assert_eq!(hidden.of(0), None);
    }

    #[test]
    fn more_ranks_than_ids_are_refused_unless_ranks_may_share() {
        let error = resolved(&options("0,2", 3), &[]).unwrap_err();
        assert!(error.is_usage());
        let text = error.to_string();
        for part in ["3 ranks", "2 GPUs (0,2)", "--oversubscribe-gpus"] {
            assert!(text.contains(part), "{text}");
        }
        let refused = [(OVERSUBSCRIBE, "0")];
        assert!(resolved(&options("0,2", 3), &refused).is_err());
        let shared = Options {
            oversubscribe_gpus: true,
            ..options("0,2", 3)
        };
        let by_option = resolved(&shared, &refused).unwrap();
        assert_eq!(variable(&by_option, OVERSUBSCRIBE).as_deref(), Some("1"));
        let by_variable = resolved(&options("0,2", 3), &[(OVERSUBSCRIBE, "True")]).unwrap();
        assert_eq!(variable(&by_variable, OVERSUBSCRIBE), None, "inherited");
        for gpus in [by_option, by_variable] {
            let third = Some("0".to_owned());
            assert_eq!(taken(&gpus, 3)[2], third);
        }
    }
}
