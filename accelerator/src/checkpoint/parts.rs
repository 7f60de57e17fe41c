use core::fmt;
use core::marker::PhantomData;

use burn::module::Module;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::restorer::Restorer;
use super::snapshot::{Snapshot, SnapshotExchange};
use super::state_file::PartKind;
use crate::core::dyn_module::BoxedModule;
use crate::core::error::Result;
use crate::core::module;
use crate::data::PreparedLoader;
use crate::ema::Ema;
use crate::optim::{Manual, PreparedOptimizer, Scheduled};

/// Parts that [`Accelerator::save_state`](crate::Accelerator::save_state) saves: references to prepared
/// models, optimizers and loaders, [`Object`]s and [`PerRank`] values, or a tuple of these.
///
/// `K` is always inferred, as for [`Prepare`](crate::Prepare).
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be saved in a checkpoint",
    label = "not a reference to a prepared part, an `Object(&value)`, `PerRank(&value)`, or a tuple",
    note = "pass references to what `prepare` gave: `(&model, &optimizer, &train)`",
    note = "values of your own go in as `Object(&value)`, one for all ranks, or `PerRank(&value)`"
)]
pub trait Save<K> {
    #[doc(hidden)]
    fn collect(&self, snapshot: &mut Snapshot<'_>) -> Result<()>;

    /// Exchanges between all ranks, once all are known to be ready.
    #[doc(hidden)]
    #[track_caller]
    fn settle(&self, settling: &mut SnapshotExchange<'_>) -> Result<()> {
        settling.pass_over();
        Ok(())
    }
}

/// Parts without their types, so that a checkpoint is saved by code of this crate.
pub(crate) trait DynSave {
    fn collect(&self, snapshot: &mut Snapshot<'_>) -> Result<()>;

    #[track_caller]
    fn settle(&self, settling: &mut SnapshotExchange<'_>) -> Result<()>;
}

/// Parts that are saved as `K`.
pub(crate) struct SavedAs<K, P>(P, PhantomData<K>);

impl<K, P: Save<K>> SavedAs<K, P> {
    pub(crate) fn new(parts: P) -> Self {
        Self(parts, PhantomData)
    }
}

impl<K, P: Save<K>> DynSave for SavedAs<K, P> {
    fn collect(&self, snapshot: &mut Snapshot<'_>) -> Result<()> {
        self.0.collect(snapshot)
    }

    fn settle(&self, settling: &mut SnapshotExchange<'_>) -> Result<()> {
        self.0.settle(settling)
    }
}

/// Parts that [`Accelerator::resume`](crate::Accelerator::resume) takes and gives back: prepared models,
/// optimizers and loaders, [`Object`]s and [`PerRank`] values, or a tuple of these.
///
/// `K` is always inferred, as for [`Prepare`](crate::Prepare).
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be resumed from a checkpoint",
    label = "not a prepared part, an `Object(value)`, `PerRank(value)`, or a tuple of these",
    note = "pass what `prepare` gave, by value: `(model, optimizer, train)`",
    note = "values of your own go in as `Object(value)`, as they are at the start"
)]
pub trait Resume<K>: Sized {
    #[doc(hidden)]
    fn kinds(kinds: &mut Vec<PartKind>);

    #[doc(hidden)]
    #[track_caller]
    fn restore(self, restorer: &mut Restorer<'_>) -> Result<Self>;
}

/// A value of the program's own in a checkpoint that is the same for all ranks. Rank 0's value is saved, and every
/// rank gets it.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Object<T>(
    /// The value; a reference to it to save.
    pub T,
);

/// A value of the program's own in a checkpoint that differs between ranks. The values are sent to rank 0, which
/// writes them.
///
/// With another number of ranks, rank `r` gets what rank `r` saved, and a rank for which nothing
/// was saved keeps what it passes; so it is after an emergency save, which holds the writer's own
/// value alone.
///
/// ```
/// use accelerator::prelude::*;
/// use accelerator::checkpoint::PerRank;
///
/// # let folder = tempfile::tempdir().unwrap();
/// # let folder = folder.path();
/// launch(2, |accelerator| {
///     let mine = 10 * accelerator.rank();
///     accelerator.save_state(folder, PerRank(&mine))?;
///     let (PerRank(back), _) = accelerator.resume(folder, PerRank(0))?;
///     assert_eq!(back, mine);
///     Ok(())
/// })?;
/// # Ok::<(), Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct PerRank<T>(
    /// The value; a reference to it to save.
    pub T,
);

impl<M: Module + fmt::Display + 'static> Save<module::Model> for &M {
    fn collect(&self, snapshot: &mut Snapshot<'_>) -> Result<()> {
        snapshot.add_model(*self)
    }

    fn settle(&self, settling: &mut SnapshotExchange<'_>) -> Result<()> {
        settling.model(*self)
    }
}

impl<M: Module + fmt::Display + 'static> Resume<module::Model> for M {
    fn kinds(kinds: &mut Vec<PartKind>) {
        kinds.push(PartKind::Model);
    }

    fn restore(self, restorer: &mut Restorer<'_>) -> Result<Self> {
        Ok(restorer.model(BoxedModule::new(self))?.into_model())
    }
}

// To a checkpoint it is one more model.
impl<M: Module + fmt::Display + 'static> Save<module::Part> for &Ema<M> {
    fn collect(&self, snapshot: &mut Snapshot<'_>) -> Result<()> {
        snapshot.add_companion("an `Ema`", self.model())
    }

    fn settle(&self, settling: &mut SnapshotExchange<'_>) -> Result<()> {
        settling.model(self.model())
    }
}

impl<M: Module + fmt::Display + 'static> Resume<module::Part> for Ema<M> {
    fn kinds(kinds: &mut Vec<PartKind>) {
        kinds.push(PartKind::Model);
    }

    fn restore(self, restorer: &mut Restorer<'_>) -> Result<Self> {
        let average = restorer
            .companion(BoxedModule::new(self.average))?
            .valid()
            .into_model();
        Ok(Self { average, ..self })
    }
}

macro_rules! optimizers {
    ($($schedule:ident),+) => {
        $(
            impl Save<module::Part> for &PreparedOptimizer<$schedule> {
                fn collect(&self, snapshot: &mut Snapshot<'_>) -> Result<()> {
                    snapshot.add_optimizer(self)
                }
            }

            impl Resume<module::Part> for PreparedOptimizer<$schedule> {
                fn kinds(kinds: &mut Vec<PartKind>) {
                    kinds.push(PartKind::Optimizer);
                }

                fn restore(self, restorer: &mut Restorer<'_>) -> Result<Self> {
                    restorer.optimizer(self)
                }
            }
        )+
    };
}

optimizers!(Manual, Scheduled);

impl<O: Send + 'static> Save<module::Part> for &PreparedLoader<O> {
    fn collect(&self, snapshot: &mut Snapshot<'_>) -> Result<()> {
        snapshot.add_loader(self.loader_state());
        Ok(())
    }
}

impl<O: Send + 'static> Resume<module::Part> for PreparedLoader<O> {
    fn kinds(kinds: &mut Vec<PartKind>) {
        kinds.push(PartKind::Loader);
    }

    fn restore(self, restorer: &mut Restorer<'_>) -> Result<Self> {
        restorer.loader(self)
    }
}

impl<T: Serialize> Save<module::Part> for Object<&T> {
    fn collect(&self, snapshot: &mut Snapshot<'_>) -> Result<()> {
        snapshot.add_object(self.0)
    }
}

impl<T: DeserializeOwned> Resume<module::Part> for Object<T> {
    fn kinds(kinds: &mut Vec<PartKind>) {
        kinds.push(PartKind::Object);
    }

    fn restore(self, restorer: &mut Restorer<'_>) -> Result<Self> {
        restorer.object().map(Self)
    }
}

impl<T: Serialize> Save<module::Part> for PerRank<&T> {
    fn collect(&self, snapshot: &mut Snapshot<'_>) -> Result<()> {
        snapshot.add_per_rank(self.0)
    }
}

impl<T: DeserializeOwned> Resume<module::Part> for PerRank<T> {
    fn kinds(kinds: &mut Vec<PartKind>) {
        kinds.push(PartKind::PerRank);
    }

    fn restore(self, restorer: &mut Restorer<'_>) -> Result<Self> {
        let saved = restorer.per_rank()?;
        Ok(saved.map_or(self, Self))
    }
}

// Saves nothing, for `recover(())`.
impl Save<()> for () {
    fn collect(&self, _snapshot: &mut Snapshot<'_>) -> Result<()> {
        Ok(())
    }
}

macro_rules! tuples {
    ($($part:ident $kind:ident),+) => {
        impl<$($part, $kind),+> Save<($($kind,)+)> for ($($part,)+)
        where
            $($part: Save<$kind>),+
        {
            #[allow(non_snake_case, reason = "the names are those of the type parameters")]
            fn collect(&self, snapshot: &mut Snapshot<'_>) -> Result<()> {
                let ($($part,)+) = self;
                $(Save::<$kind>::collect($part, snapshot)?;)+
                Ok(())
            }

            #[allow(non_snake_case, reason = "the names are those of the type parameters")]
            fn settle(&self, settling: &mut SnapshotExchange<'_>) -> Result<()> {
                let ($($part,)+) = self;
                $(Save::<$kind>::settle($part, settling)?;)+
                Ok(())
            }
        }

        impl<$($part, $kind),+> Resume<($($kind,)+)> for ($($part,)+)
        where
            $($part: Resume<$kind>),+
        {
            fn kinds(kinds: &mut Vec<PartKind>) {
                $($part::kinds(kinds);)+
            }

            #[allow(non_snake_case, reason = "the names are those of the type parameters")]
            fn restore(self, restorer: &mut Restorer<'_>) -> Result<Self> {
                let ($($part,)+) = self;
                Ok(($($part.restore(restorer)?,)+))
            }
        }
    };
}

tuples!(A KA);
tuples!(A KA, B KB);
tuples!(A KA, B KB, C KC);
tuples!(A KA, B KB, C KC, D KD);
tuples!(A KA, B KB, C KC, D KD, E KE);
tuples!(A KA, B KB, C KC, D KD, E KE, F KF);
tuples!(A KA, B KB, C KC, D KD, E KE, F KF, G KG);
tuples!(A KA, B KB, C KC, D KD, E KE, F KF, G KG, H KH);
