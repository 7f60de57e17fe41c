//! The place of a process in the group that follows this one.

use std::{collections::BTreeMap, time::Duration};

use accelerator_host::variable;

use super::ProcessGroup;
use crate::{
    error::{Error, Kind, Result, Seconds},
    launch::Launch,
};

/// The place of a process in the group that follows this one, of another size.
///
/// ```
/// use accelerator_collective::{Launch, ProcessGroup, GroupOptions, launcher::NextPlace};
///
/// # fn main() -> accelerator_collective::Result<()> {
/// let next = |place| match place {
///     // This group is closed first.
///     NextPlace::Join(launch) => ProcessGroup::connect(&launch, &GroupOptions::new()).map(Some),
///     NextPlace::Leave => Ok(None),
/// };
/// let group = next(NextPlace::Join(Box::new(Launch::single())))?;
/// assert_eq!(group.map(|group| group.world_size()), Some(1));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub enum NextPlace {
    /// The process is this rank of the next group.
    Join(Box<Launch>),
    /// The process is no rank of the next group, and ends.
    Leave,
}

impl ProcessGroup {
    /// Returns `true` if the launcher has told this process its place in a next group. Nothing is sent or awaited.
    /// Other ranks may learn of theirs a moment earlier or later. It is always `false` without a launcher that does so.
    #[doc(hidden)]
    pub fn has_next_place(&self) -> bool {
        let store = self.0.rank_state.store();
        store.is_some_and(|store| store.has_next_place())
    }

    /// The place that the launcher gives this process in the next group; waits up to `timeout` for it. The group may be
    /// closed already.
    ///
    /// # Errors
    ///
    /// A rendezvous error if none comes in time; a topology error if the launcher tells a place that cannot be.
    #[doc(hidden)]
    pub fn next_place(&self, timeout: Duration) -> Result<NextPlace> {
        let store = self.0.rank_state.store();
        let Some(told) = store.and_then(|store| store.next_place(timeout)) else {
            return Err(Error::new(
                Kind::Rendezvous,
                format!(
                    "the launcher has told {} no place in a next group, within {}",
                    self.topology(),
                    Seconds(timeout)
                ),
            ));
        };
        if told.is_empty() {
            return Ok(NextPlace::Leave);
        }
        let told: BTreeMap<String, String> = told.into_iter().collect();
        let launch = Launch::from_vars(|name| match told.get(name) {
            Some(value) => Some(value.clone()),
            None => Some(variable(name)?.to_string_lossy().into_owned()),
        })?;
        Ok(NextPlace::Join(Box::new(launch)))
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::{
        GroupOptions,
        rendezvous::{StoreServer, Token},
    };

    const SOON: Duration = Duration::from_secs(10);

    /// A launch as a launcher describes it to a process.
    fn launch(store: &StoreServer, rank: usize, size: usize, elastic: &str) -> Launch {
        let told: BTreeMap<_, _> = variables(store, rank, size, elastic).into_iter().collect();
        Launch::from_vars(|name| told.get(name).cloned()).unwrap()
    }

    fn variables(
        store: &StoreServer,
        rank: usize,
        size: usize,
        elastic: &str,
    ) -> Vec<(String, String)> {
        let told = [
            ("RANK", rank.to_string()),
            ("WORLD_SIZE", size.to_string()),
            ("MASTER_ADDR", "127.0.0.1".to_owned()),
            ("ACCEL_PORT", store.local_addr().port().to_string()),
            ("ACCEL_STORE", "launcher".to_owned()),
            ("ACCEL_TRANSPORT", "tcp".to_owned()),
            ("ACCEL_ELASTIC", elastic.to_owned()),
        ];
        let told = told.map(|(name, value)| (name.to_owned(), value));
        told.to_vec()
    }

    fn store(size: usize) -> StoreServer {
        StoreServer::bind(("127.0.0.1", 0), size, None::<Token>).unwrap()
    }

    fn sum(group: &ProcessGroup) -> f64 {
        let mut sum = [1.0];
        group.all_reduce(&mut sum, crate::ReduceOp::Sum).unwrap();
        sum[0]
    }

    fn connect(launch: &Launch) -> ProcessGroup {
        let options = GroupOptions::new().with_connect_timeout(SOON);
        ProcessGroup::connect(launch, &options).unwrap()
    }

    fn next(group: &ProcessGroup) -> Option<ProcessGroup> {
        group.close().unwrap();
        match group.next_place(SOON).unwrap() {
            NextPlace::Join(launch) => Some(connect(&launch)),
            NextPlace::Leave => None,
        }
    }

    #[test]
    fn a_place_that_is_told_before_the_ranks_have_met_waits_for_them() {
        let [first, second] = [store(2), store(1)];
        first.tell_next_place(0, variables(&second, 0, 1, "running"));
        first.tell_next_place(1, []);
        thread::scope(|scope| {
            for rank in 0..2 {
                let launch = launch(&first, rank, 2, "running");
                scope.spawn(move || {
                    let group = connect(&launch);
                    assert_eq!(sum(&group), 2.0);
                    assert_eq!(next(&group).is_some(), rank == 0);
                });
            }
        });
    }

    #[test]
    fn one_process_becomes_three_and_then_two() {
        let [first, second, third] = [store(1), store(3), store(2)];
        thread::scope(|scope| {
            for rank in 1..3 {
                let launch = launch(&second, rank, 3, "joining");
                scope.spawn(move || {
                    let group = connect(&launch);
                    assert_eq!(sum(&group), 3.0);
                    let group = next(&group);
                    assert_eq!(group.is_some(), rank == 2, "rank 1 leaves");
                    if let Some(group) = group {
                        assert_eq!((group.rank(), sum(&group)), (1, 2.0));
                    }
                });
            }
            let alone = connect(&launch(&first, 0, 1, "running"));
            assert_eq!(sum(&alone), 1.0);
            assert!(!alone.has_next_place());
            first.tell_next_place(0, variables(&second, 0, 3, "running"));
            let group = next(&alone).unwrap();
            assert_eq!(sum(&group), 3.0);
            second.tell_next_place(0, variables(&third, 0, 2, "running"));
            second.tell_next_place(1, []);
            second.tell_next_place(2, variables(&third, 1, 2, "running"));
            assert_eq!(sum(&next(&group).unwrap()), 2.0);
        });
    }
}
