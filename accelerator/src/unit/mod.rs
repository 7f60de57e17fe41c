//! Units: blocks of a model, each of which is a single operation of the graph. See this folder's README.

mod keep;
mod recompute;
mod seeded_run;
mod sharding;
mod statistics;
mod visited;

use core::cell::Cell;
use core::fmt;
use core::str::FromStr;
use std::sync::Arc;

use burn::module::{
    Content, Devices, DisplaySettings, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper,
    ModuleVisitor, Param, Parameter,
};
use burn::tensor::{Bool, Device, Int, Tensor};

pub(crate) use self::recompute::backward_begins;
pub use self::recompute::recompute;
pub(crate) use self::seeded_run::runs_twice;
use self::sharding::{Cutter, Sharding};
pub(crate) use self::sharding::{shard, whole};
use self::visited::{visit_unit, visited_unit};
use crate::context::Context;
use crate::core::draws;
use crate::core::dyn_module::{BoxedModule, DynModule};
use crate::core::error::{Error, Result, named};
use crate::core::module::Unchanged;
use crate::core::scoped::Scoped;
use crate::core::tensor::any_rank;
use crate::core::tensors::{Tensors, map_floats};

/// The mode in which the [`Unit`]s of a model run, set by
/// [`AcceleratorBuilder::units`](crate::AcceleratorBuilder::units). `Display` and `FromStr` use the values of
/// `ACCEL_UNITS`: `plain`, `keep`, `recompute` and `shard`.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum Units {
    /// Runs the block as if it were not in a unit.
    #[default]
    Plain,
    /// Runs the block like [`Plain`](Self::Plain), but completes the unit's gradients as soon as the backward pass leaves
    /// it, so that they can be [sent](crate::Overlap) while the backward pass continues.
    Keep,
    /// Keeps only the inputs of each unit, not its activations, and runs the unit again in backward ([`recompute`]).
    Recompute,
    /// Shards the parameters of each unit over the ranks (ZeRO stage 3, like PyTorch's FSDP). Each rank stores one piece of
    /// each parameter, of its gradient and of its optimizer state. The ranks gather the parameters of a unit before it runs
    /// and free them afterwards. Activations are recomputed as with [`Recompute`](Self::Recompute). With a single rank,
    /// this is the same as `Recompute`, unless an
    /// [offload folder](crate::AcceleratorBuilder::offload_folder) is set.
    ///
    /// Frozen matrices, such as the base of adapters, are sharded as well. Every rank keeps whole copies of other frozen
    /// parameters, of quantised ones, and of parameters outside units. The optimizer must update each element
    /// independently of the others, as SGD, Adam and AdamW do. Every rank must run the same units in the same order. If
    /// gradients are accumulated, the last bits can differ from those of other modes. A unit panics if it runs after the
    /// accelerator that prepared the model was dropped.
    ///
    /// Save the model with [`save_model`](crate::Accelerator::save_model) or
    /// [`save_state`](crate::Accelerator::save_state): Burn's own records would contain only this rank's pieces.
    Shard,
}

impl Units {
    const ALL: [Self; 4] = [Self::Plain, Self::Keep, Self::Recompute, Self::Shard];

    /// Returns `true` if ranks hold pieces of the units' parameters, and gather a unit's parameters before it runs. With a
    /// single rank, this is so only if offloading is on.
    pub(crate) fn are_sharded(self, context: &Context) -> bool {
        self == Self::Shard && (context.world_size() > 1 || context.offload.is_some())
    }
}

impl fmt::Display for Units {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Plain => "plain",
            Self::Keep => "keep",
            Self::Recompute => "recompute",
            Self::Shard => "shard",
        })
    }
}

impl FromStr for Units {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        named("mode of units", name, &Self::ALL)
    }
}

/// A wrapper around a block of a model. Depending on the mode ([`Units`]), the activations of the block are recomputed in
/// the backward pass instead of being kept, and its parameters are sharded.
///
/// A model holds `Vec<Unit<TransformerEncoderLayer>>` instead of `Vec<TransformerEncoderLayer>`, and calls
/// [`run`](Self::run) instead of the block's `forward`. [`prepare`](crate::Accelerator::prepare) sets the mode
/// ([`Units`]) of a model's units; in a model that is not prepared, a unit simply runs its block. Parameter paths and
/// ids, records and files are those of the block.
///
/// ```
/// use accelerator::nn::{Unit, Units};
/// use accelerator::prelude::*;
/// use burn::module::Module;
/// use burn::nn::transformer::{TransformerEncoderConfig, TransformerEncoderLayer};
/// use burn::optim::SgdConfig;
/// use burn::tensor::{Device, Distribution, Tensor};
///
/// #[derive(Module, Debug)]
/// struct Encoder {
///     layers: Vec<Unit<TransformerEncoderLayer>>,
/// }
///
/// impl Encoder {
///     fn new(device: &Device) -> Self {
///         let config = TransformerEncoderConfig::new(8, 16, 2, 3);
///         let layer = || Unit::new(TransformerEncoderLayer::new(&config, device));
///         Self { layers: (0..3).map(|_| layer()).collect() }
///     }
///
///     fn forward(&self, mut x: Tensor<3>) -> Tensor<3> {
///         for layer in &self.layers {
///             x = layer.run(x, |layer, x| layer.forward(x, None, None));
///         }
///         x
///     }
/// }
///
/// let accelerator = Accelerator::builder().units(Units::Recompute).build()?;
/// let model = accelerator.init(Encoder::new);
/// let (mut model, mut optimizer) = accelerator.prepare((model, SgdConfig::new().init()))?;
/// let x = Tensor::random([4, 5, 8], Distribution::Default, &accelerator.device());
/// let gradients = accelerator.backward(model.forward(x).mean(), &model, 4)?;
/// model = optimizer.step(0.1, model, gradients);
/// # Ok::<(), Error>(())
/// ```
#[derive(Clone)]
pub struct Unit<M> {
    block: M,
    prepared: Option<Prepared>,
}

/// The mode and the place of a unit in a prepared model.
#[derive(Clone, Debug)]
struct Prepared {
    mode: UnitMode,
    /// Set if the unit's parameters are sharded.
    sharding: Option<Arc<Sharding>>,
}

#[derive(Clone, Copy, Debug)]
struct UnitMode {
    units: Units,
    /// The number of units that the model visits before this one.
    number: usize,
}

impl<M: Module + 'static> Unit<M> {
    /// Wraps a block in a unit.
    pub fn new(block: M) -> Self {
        Self {
            block,
            prepared: None,
        }
    }

    /// Runs the block on its input: tensors, alone or in tuples, arrays, vectors and options.
    ///
    /// `forward` may compute only with the block and the input that it is given. With [`Units::Recompute`], it runs
    /// twice and draws the same random numbers both times; running statistics, such as those of a batch norm, are
    /// updated once.
    ///
    /// In a prepared model, a unit seeds the generator of its device before it runs, in every mode, so a model with dropout
    /// draws the same numbers in all of them. The seed is derived from the seed of the accelerator, or of the step of a
    /// prepared loader.
    ///
    /// # Panics
    ///
    /// See [`recompute`].
    pub fn run<I, O>(&self, input: I, forward: impl Fn(&M, I) -> O + Send + 'static) -> O
    where
        I: Tensors + Clone + Send + 'static,
        O: Tensors + 'static,
    {
        let Some(Prepared { mode, sharding }) = &self.prepared else {
            return forward(&self.block, input);
        };
        let UnitMode { units, number } = *mode;
        if matches!(units, Units::Recompute | Units::Shard) {
            return recompute::run(&self.block, sharding.clone(), input, forward);
        }
        let mut devices = self.block.devices();
        let input = map_floats(input, &mut |tensor| {
            devices.push(any_rank(&tensor).device());
            tensor
        });
        let Some(device) = devices.into_iter().find(Device::is_autodiff) else {
            // Without an autodiff device there are no gradients and no dropout, so the unit needs no seed.
            return forward(&self.block, input);
        };
        let seed = draws::next_unit_seed(&device);
        if units == Units::Keep {
            let block = keep::lifted(BoxedModule::new(self.block.clone()), number).into_model();
            return draws::in_unit(seed, &device, || forward(&block, input));
        }
        draws::in_unit(seed, &device, || forward(&self.block, input))
    }
}

/// Initializes the parameters of a model that are in no unit, in the order of the model.
pub(crate) fn draw_outside(model: &dyn DynModule) {
    struct Drawer;
    impl Drawer {
        fn draw<T: Parameter>(param: &Param<T>) {
            if visited_unit().is_none() {
                drop(param.base());
            }
        }
    }
    impl ModuleVisitor for Drawer {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            Self::draw(param);
        }

        fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
            Self::draw(param);
        }

        fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
            Self::draw(param);
        }
    }
    model.visit(&mut Drawer);
}

/// Sets the mode and the number of each unit of a model, whose parameters must be [whole]. Returns the model, and the number
/// of its units.
pub(crate) fn prepare(model: BoxedModule, units: Units) -> (BoxedModule, usize) {
    let _preparing = Scoped::set(&PREPARING, Some(UnitMode { units, number: 0 }));
    let model = model.map(&mut Unchanged);
    (model, PREPARING.get().map_or(0, |next| next.number))
}

/// Runs `fork`, which forks a model that cannot be taken out of its owner, and sets the mode and the number of each of its
/// units, which must not be sharded.
#[cfg(feature = "burn-train")]
pub(crate) fn prepare_in_place(units: Units, fork: impl FnOnce()) {
    let _preparing = Scoped::set(&PREPARING, Some(UnitMode { units, number: 0 }));
    fork();
}

thread_local! {
    /// The next unit of the model that is being prepared. A mapper sees only parameters, so units read their place
    /// here.
    static PREPARING: Cell<Option<UnitMode>> = const { Cell::new(None) };
}

impl<M> Unit<M> {
    /// Takes the next mode of the model that is being prepared, if one is.
    fn take_mode(&mut self) {
        if let Some(mode) = PREPARING.get() {
            self.prepared = Some(Prepared {
                mode,
                sharding: None,
            });
            PREPARING.set(Some(UnitMode {
                number: mode.number + 1,
                ..mode
            }));
        }
    }
}

impl<M: Module + 'static> Module for Unit<M> {
    fn map<T: ModuleMapper>(mut self, mapper: &mut T) -> Self {
        self.take_mode();
        let Some(prepared) = &mut self.prepared else {
            self.block = self.block.map(mapper);
            return self;
        };
        if let Some(sharding) = prepared.sharding.take() {
            let (block, sharding) = sharding.map(|| self.block.map(mapper));
            (self.block, prepared.sharding) = (block, Some(sharding));
        } else if let Some(mut cutter) = Cutter::take() {
            let (block, sharding) = cutter.cut(prepared.mode.number, BoxedModule::new(self.block));
            cutter.put_back();
            (self.block, prepared.sharding) = (block.into_model(), Some(Arc::new(sharding)));
        } else {
            self.block = self.block.map(mapper);
        }
        self
    }

    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        let prepared = self.prepared.as_ref();
        let number = prepared.map_or(0, |prepared| prepared.mode.number);
        let _visited = visit_unit(number);
        match prepared.and_then(|prepared| prepared.sharding.as_ref()) {
            Some(sharding) => sharding.pieces.show(|| self.block.visit(visitor)),
            None => self.block.visit(visitor),
        }
    }

    fn collect_devices(&self, devices: Devices) -> Devices {
        self.block.collect_devices(devices)
    }

    fn fork(mut self, device: &Device) -> Self {
        self.take_mode();
        self.block = self.block.fork(device);
        self
    }

    fn to_device(mut self, device: &Device) -> Self {
        self.block = self.block.to_device(device);
        self
    }

    fn train(mut self) -> Self {
        self.block = self.block.train();
        self
    }

    fn valid(&self) -> Self {
        Self {
            block: self.block.valid(),
            prepared: self.prepared.clone(),
        }
    }

    fn materialize(mut self) -> Self {
        self.block = self.block.materialize();
        self
    }
}

impl<M: ModuleDisplay> ModuleDisplayDefault for Unit<M> {
    fn content(&self, content: Content) -> Option<Content> {
        self.block.content(content)
    }

    fn num_params(&self) -> usize {
        ModuleDisplayDefault::num_params(&self.block)
    }
}

impl<M: ModuleDisplay> ModuleDisplay for Unit<M> {
    fn format(&self, settings: DisplaySettings) -> String {
        self.block.format(settings)
    }
}

impl<M: ModuleDisplay> fmt::Display for Unit<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.format(DisplaySettings::new()))
    }
}

impl<M: fmt::Debug> fmt::Debug for Unit<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Unit").field(&self.block).finish()
    }
}

#[cfg(test)]
mod tests;
