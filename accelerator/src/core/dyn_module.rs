//! Models without their types. Code that works on models is compiled once, in this crate, instead of in every program
//! for each of its models: a program instantiates only [`DynModule`].

use core::any::Any;
use core::fmt;

use burn::module::{Devices, Flag, Module, ModuleMapper, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{Bool, Device, Float, Gradients, Int, Tensor};

/// A [`Module`] of any type. A reference to a model coerces to `&dyn DynModule`; a model is boxed as [`BoxedModule`].
pub(crate) trait DynModule: Any + Send {
    fn dyn_clone(&self) -> Box<dyn DynModule>;
    fn dyn_into_any(self: Box<Self>) -> Box<dyn Any>;
    fn dyn_format(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result;
    fn dyn_devices(&self, devices: Devices) -> Devices;
    fn dyn_fork(self: Box<Self>, device: &Device) -> Box<dyn DynModule>;
    fn dyn_to_device(self: Box<Self>, device: &Device) -> Box<dyn DynModule>;
    fn dyn_train(self: Box<Self>) -> Box<dyn DynModule>;
    fn dyn_valid(&self) -> Box<dyn DynModule>;
    fn dyn_materialize(self: Box<Self>) -> Box<dyn DynModule>;
    fn dyn_visit(&self, visitor: &mut dyn DynVisitor);
    fn dyn_map(self: Box<Self>, mapper: &mut dyn DynMapper) -> Box<dyn DynModule>;
}

impl<M: Module + 'static> DynModule for M {
    fn dyn_clone(&self) -> Box<dyn DynModule> {
        Box::new(self.clone())
    }

    fn dyn_into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }

    fn dyn_format(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }

    fn dyn_devices(&self, devices: Devices) -> Devices {
        self.collect_devices(devices)
    }

    fn dyn_fork(self: Box<Self>, device: &Device) -> Box<dyn DynModule> {
        Box::new((*self).fork(device))
    }

    fn dyn_to_device(self: Box<Self>, device: &Device) -> Box<dyn DynModule> {
        Box::new((*self).to_device(device))
    }

    fn dyn_train(self: Box<Self>) -> Box<dyn DynModule> {
        Box::new((*self).train())
    }

    fn dyn_valid(&self) -> Box<dyn DynModule> {
        Box::new(self.valid())
    }

    fn dyn_materialize(self: Box<Self>) -> Box<dyn DynModule> {
        Box::new((*self).materialize())
    }

    fn dyn_visit(&self, visitor: &mut dyn DynVisitor) {
        self.visit(&mut ErasedVisitor(visitor));
    }

    fn dyn_map(self: Box<Self>, mapper: &mut dyn DynMapper) -> Box<dyn DynModule> {
        Box::new((*self).map(&mut ErasedMapper(mapper)))
    }
}

impl dyn DynModule {
    /// The same as [`Module::visit`].
    pub(crate) fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        self.dyn_visit(&mut RankedVisitor(visitor));
    }

    /// Clones the model.
    pub(crate) fn boxed(&self) -> BoxedModule {
        BoxedModule(self.dyn_clone())
    }

    /// The same as [`Module::valid`].
    pub(crate) fn valid(&self) -> BoxedModule {
        BoxedModule(self.dyn_valid())
    }

    /// The same as [`GradientsParams::from_grads`].
    pub(crate) fn gradients(&self, gradients: Gradients) -> GradientsParams {
        let mut reader = GradientReader {
            gradients,
            by_id: GradientsParams::new(),
        };
        self.visit(&mut reader);
        reader.by_id
    }
}

struct GradientReader {
    gradients: Gradients,
    by_id: GradientsParams,
}

impl ModuleVisitor for GradientReader {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        // A tensor that records none has no node to ask.
        if param.is_require_grad()
            && let Some(gradient) = param.val().grad_remove(&mut self.gradients)
        {
            self.by_id.register(param.id, gradient);
        }
    }
}

/// A model of any type, which is a module itself.
pub(crate) struct BoxedModule(Box<dyn DynModule>);

impl BoxedModule {
    pub(crate) fn new<M: Module + 'static>(model: M) -> Self {
        Self(Box::new(model))
    }

    /// Returns the model.
    ///
    /// # Panics
    ///
    /// Panics if it is of another type.
    pub(crate) fn into_model<M: Module + 'static>(self) -> M {
        #[expect(
            clippy::expect_used,
            reason = "callers name the type of the model that they boxed"
        )]
        let model = self
            .0
            .dyn_into_any()
            .downcast()
            .expect("a model of that type");
        *model
    }
}

impl Module for BoxedModule {
    fn collect_devices(&self, devices: Devices) -> Devices {
        self.0.dyn_devices(devices)
    }

    fn fork(self, device: &Device) -> Self {
        Self(self.0.dyn_fork(device))
    }

    fn to_device(self, device: &Device) -> Self {
        Self(self.0.dyn_to_device(device))
    }

    fn train(self) -> Self {
        Self(self.0.dyn_train())
    }

    fn valid(&self) -> Self {
        Self(self.0.dyn_valid())
    }

    fn materialize(self) -> Self {
        Self(self.0.dyn_materialize())
    }

    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        self.0.visit(visitor);
    }

    fn map<P: ModuleMapper>(self, mapper: &mut P) -> Self {
        Self(self.0.dyn_map(&mut RankedMapper(mapper)))
    }
}

impl Clone for BoxedModule {
    fn clone(&self) -> Self {
        self.0.boxed()
    }
}

impl fmt::Debug for BoxedModule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.dyn_format(f)
    }
}

/// A visitor whose type is not known. Parameters come as `Param<Tensor<D, _>>`.
pub(crate) trait DynVisitor {
    fn enter(&mut self, name: &str, container_type: &str);
    fn exit(&mut self, name: &str, container_type: &str);
    fn float(&mut self, param: &dyn Any);
    fn int(&mut self, param: &dyn Any);
    fn bool(&mut self, param: &dyn Any);
    fn flag(&mut self, flag: &Param<Flag>);
}

/// A mapper whose type is not known. Parameters come, and return, as `Option<Param<Tensor<D, _>>>`.
pub(crate) trait DynMapper {
    fn enter(&mut self, name: &str, container_type: &str);
    fn exit(&mut self, name: &str, container_type: &str);
    fn float(&mut self, param: &mut dyn Any);
    fn int(&mut self, param: &mut dyn Any);
    fn bool(&mut self, param: &mut dyn Any);
    fn flag(&mut self, flag: Param<Flag>) -> Param<Flag>;
}

/// The visitor that a model sees.
struct ErasedVisitor<'a>(&'a mut dyn DynVisitor);

impl ModuleVisitor for ErasedVisitor<'_> {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.0.enter(name, container_type);
    }

    fn exit_module(&mut self, name: &str, container_type: &str) {
        self.0.exit(name, container_type);
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.float(param);
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.0.int(param);
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.0.bool(param);
    }

    fn visit_flag(&mut self, flag: &Param<Flag>) {
        self.0.flag(flag);
    }
}

/// The mapper that a model sees.
struct ErasedMapper<'a>(&'a mut dyn DynMapper);

macro_rules! map {
    ($method:ident, $erased:ident, $kind:ty) => {
        fn $method<const D: usize>(
            &mut self,
            param: Param<Tensor<D, $kind>>,
        ) -> Param<Tensor<D, $kind>> {
            let mut param = Some(param);
            self.0.$erased(&mut param);
            // `RankedMapper` puts the mapped parameter back.
            param.expect("the mapped parameter")
        }
    };
}

impl ModuleMapper for ErasedMapper<'_> {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.0.enter(name, container_type);
    }

    fn exit_module(&mut self, name: &str, container_type: &str) {
        self.0.exit(name, container_type);
    }

    map!(map_float, float, Float);
    map!(map_int, int, Int);
    map!(map_bool, bool, Bool);

    fn map_flag(&mut self, flag: Param<Flag>) -> Param<Flag> {
        self.0.flag(flag)
    }
}

/// A visitor or mapper as a [`DynModule`] calls it: a parameter's rank is found by its type.
struct RankedVisitor<'a, V>(&'a mut V);

struct RankedMapper<'a, P>(&'a mut P);

/// Calls a method with a parameter of some rank, which is found by its type.
macro_rules! by_rank {
    ($param:ident: $kind:ty, $typed:ident => $call:expr, $($rank:literal)+) => {
        $(
            if let Some($typed) = $param.downcast_ref::<Param<Tensor<$rank, $kind>>>() {
                return $call;
            }
        )+
        too_many_dimensions();
    };
    (mut $param:ident: $kind:ty, $typed:ident => $call:expr, $($rank:literal)+) => {
        $(
            if let Some(slot) = $param.downcast_mut::<Option<Param<Tensor<$rank, $kind>>>>() {
                *slot = slot.take().map(|$typed| $call);
                return;
            }
        )+
        too_many_dimensions();
    };
}

impl<V: ModuleVisitor> DynVisitor for RankedVisitor<'_, V> {
    fn enter(&mut self, name: &str, container_type: &str) {
        self.0.enter_module(name, container_type);
    }

    fn exit(&mut self, name: &str, container_type: &str) {
        self.0.exit_module(name, container_type);
    }

    fn float(&mut self, param: &dyn Any) {
        by_rank!(param: Float, typed => self.0.visit_float(typed), 1 2 3 4 5 6 7 8);
    }

    fn int(&mut self, param: &dyn Any) {
        by_rank!(param: Int, typed => self.0.visit_int(typed), 1 2 3 4 5 6 7 8);
    }

    fn bool(&mut self, param: &dyn Any) {
        by_rank!(param: Bool, typed => self.0.visit_bool(typed), 1 2 3 4 5 6 7 8);
    }

    fn flag(&mut self, flag: &Param<Flag>) {
        self.0.visit_flag(flag);
    }
}

impl<P: ModuleMapper> DynMapper for RankedMapper<'_, P> {
    fn enter(&mut self, name: &str, container_type: &str) {
        self.0.enter_module(name, container_type);
    }

    fn exit(&mut self, name: &str, container_type: &str) {
        self.0.exit_module(name, container_type);
    }

    fn float(&mut self, param: &mut dyn Any) {
        by_rank!(mut param: Float, typed => self.0.map_float(typed), 1 2 3 4 5 6 7 8);
    }

    fn int(&mut self, param: &mut dyn Any) {
        by_rank!(mut param: Int, typed => self.0.map_int(typed), 1 2 3 4 5 6 7 8);
    }

    fn bool(&mut self, param: &mut dyn Any) {
        by_rank!(mut param: Bool, typed => self.0.map_bool(typed), 1 2 3 4 5 6 7 8);
    }

    fn flag(&mut self, flag: Param<Flag>) -> Param<Flag> {
        self.0.map_flag(flag)
    }
}

/// Ends a visit of a parameter with more dimensions than any layer of Burn has.
fn too_many_dimensions() -> ! {
    panic!("a parameter with more than 8 dimensions is not supported")
}
