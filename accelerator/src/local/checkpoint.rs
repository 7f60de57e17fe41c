use core::fmt;

use burn::module::Module;

use super::{DiLoCo, LocalSgd};
use crate::checkpoint::{PartKind, Restorer, Resume, Save, Snapshot, SnapshotExchange};
use crate::core::error::Result;
use crate::core::kind;

// Between rounds it has nothing to keep; within one, the model refuses.
impl Save<kind::Part> for &LocalSgd {
    fn collect(&self, _snapshot: &mut Snapshot<'_>) -> Result<()> {
        Ok(())
    }

    fn settle(&self, _settling: &mut SnapshotExchange<'_>) -> Result<()> {
        Ok(())
    }
}

impl Resume<kind::Part> for LocalSgd {
    fn kinds(_kinds: &mut Vec<PartKind>) {}

    fn restore(self, _restorer: &mut Restorer<'_>) -> Result<Self> {
        Ok(self)
    }
}

// To a checkpoint it is two more models: the outer parameters, and their momentum.
impl<M: Module + fmt::Display> Save<kind::Part> for &DiLoCo<M> {
    fn collect(&self, snapshot: &mut Snapshot<'_>) -> Result<()> {
        self.states()
            .into_iter()
            .try_for_each(|state| snapshot.add_companion("`DiLoCo`", state))
    }

    fn settle(&self, settling: &mut SnapshotExchange<'_>) -> Result<()> {
        // A closure would be the caller that errors name.
        for state in self.states() {
            settling.model(state)?;
        }
        Ok(())
    }
}

impl<M: Module + fmt::Display> Resume<kind::Part> for DiLoCo<M> {
    fn kinds(kinds: &mut Vec<PartKind>) {
        kinds.extend([PartKind::Model, PartKind::Model]);
    }

    fn restore(self, restorer: &mut Restorer<'_>) -> Result<Self> {
        let (rule, [outer, velocity]) = self.into_parts();
        let outer = restorer.companion(outer)?;
        let velocity = restorer.companion(velocity)?;
        Ok(Self::from_parts(rule, [outer, velocity]))
    }
}
