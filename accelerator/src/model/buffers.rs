//! Buffers, such as the running statistics of a batch norm. Combines them across ranks, and tells them apart from
//! parameters that would never be trained.

use std::collections::{HashMap, HashSet};

use accelerator_collective::ReduceOp;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::{DType, Tensor, TensorData};

use crate::context::Context;
use crate::core::agreement::short;
use crate::core::dyn_module::DynModule;
use crate::core::error::{Error, Result};
use crate::core::module::{ModulePath, visit_floats};
use crate::core::tensor::any_rank;

/// The statistics that Burn's batch norm keeps, by the names of its fields.
const MEAN: &str = "running_mean";
const VARIANCE: &str = "running_var";

/// Gives every rank the running statistics of all. All ranks call it.
#[track_caller]
pub(crate) fn sync_buffers(context: &Context, model: &dyn DynModule) -> Result<()> {
    let group = context.group();
    if group.world_size() == 1 {
        return Ok(());
    }
    context.check_forward()?;
    let running = running_states(model);
    if running.is_empty() {
        return Ok(());
    }
    let mut buffers = Vec::new();
    visit_floats(model, |float| {
        if running.contains(&float.place) {
            buffers.push(Buffer {
                data: any_rank(&float.value).into_data(),
                path: float.path.to_owned(),
                place: float.place,
            });
        }
    });
    let mine: Vec<u64> = buffers.iter().map(Buffer::digest).collect();
    let all = group.all_gather(&mine)?;
    let same = |at: usize| {
        all.chunks_exact(mine.len())
            .all(|rank| rank[at] == mine[at])
    };
    let known: HashMap<&str, (usize, &Buffer)> = buffers
        .iter()
        .enumerate()
        .map(|(at, buffer)| (&*buffer.path, (at, buffer)))
        .collect();
    // Ranks whose variances are the same have seen more than that where their means differ.
    let mean_differs = |at: usize| {
        let mean = known.get(&*buffers[at].mean());
        mean.is_some_and(|&(mean, _)| !same(mean))
    };
    let differing: Vec<&Buffer> = (0..mine.len())
        .filter(|&at| !same(at) || mean_differs(at))
        .map(|at| &buffers[at])
        .collect();
    if differing.is_empty() {
        return Ok(());
    }
    let mean_of = |buffer: &Buffer| known.get(&*buffer.mean()).map(|&(_, mean)| mean);
    let sums: Vec<Vec<f64>> = differing
        .iter()
        .map(|buffer| moments(buffer, mean_of(buffer)))
        .collect::<Result<_>>()?;
    let mut flat = sums.concat();
    group.all_reduce(&mut flat, ReduceOp::Mean)?;
    let mut rest = &flat[..];
    let mut means: HashMap<usize, Vec<f64>> = HashMap::new();
    for buffer in &differing {
        let (own, others) = rest.split_at(buffer.data.num_elements());
        rest = others;
        means.insert(buffer.place, own.to_vec());
    }
    let mut values = HashMap::new();
    for buffer in &differing {
        let mut own = means[&buffer.place].clone();
        if let Some(mean) = mean_of(buffer) {
            let center = match means.get(&mean.place) {
                Some(center) => center.clone(),
                // The same on all ranks.
                None => mean.values()?,
            };
            for (value, center) in own.iter_mut().zip(center) {
                *value = (*value - center * center).max(0.0);
            }
        }
        let data = TensorData::new(own, buffer.data.shape().clone());
        values.insert(buffer.place, data.convert_dtype(buffer.data.dtype()));
    }
    // Clones share running states, which are changed in place.
    model.boxed().map(&mut BufferWriter { place: 0, values });
    Ok(())
}

/// Brings running statistics up to date, which Burn leaves a step behind until `valid` is called.
pub(crate) fn settle_statistics(model: &dyn DynModule) {
    drop(model.valid());
}

/// Returns the places, among the floats of a model, of the running states whose statistics are brought up to date.
pub(crate) fn running_states(model: &dyn DynModule) -> HashSet<usize> {
    // Its running states are its own, unlike a clone's.
    let model = model.valid();
    let mut before = Vec::new();
    visit_floats(&model, |float| before.push(float.id));
    let mut after = Vec::new();
    visit_floats(&model.map(&mut Renamer), |float| after.push(float.id));
    let ids = before.into_iter().zip(after).enumerate();
    ids.filter(|(_, (before, after))| before == after)
        .map(|(place, _)| place)
        .collect()
}

/// Refuses a model with a parameter on a plain device, which would be moved as one that is frozen.
pub(crate) fn check_autodiff(model: &dyn DynModule) -> Result<()> {
    let mut finder = PlainDeviceFinder::default();
    model.visit(&mut finder);
    if finder.plain.is_empty() {
        return Ok(());
    }
    // Statistics take no gradient anywhere.
    let running = running_states(model);
    let plain = finder.plain.iter().find(|(at, _)| !running.contains(at));
    let Some((_, path)) = plain else {
        return Ok(());
    };
    Err(Error::misuse(format!(
        "the parameter `{path}` of a model lies on a device that records no gradients (of `Device::default()`, \
         `.inner()` or `valid()`), so it would never be trained: build the model on `accelerator.device()`; for one \
         that is not to be trained, call `.no_grad()` on it there"
    )))
}

/// Returns the values that are added up over the ranks: the second moment for a variance whose mean is known.
fn moments(buffer: &Buffer, mean: Option<&Buffer>) -> Result<Vec<f64>> {
    let mut values = buffer.values()?;
    if let Some(mean) = mean {
        for (value, mean) in values.iter_mut().zip(mean.values()?) {
            *value += mean * mean;
        }
    }
    Ok(values)
}

struct Buffer {
    data: TensorData,
    path: String,
    place: usize,
}

impl Buffer {
    fn digest(&self) -> u64 {
        short(&blake3::hash(self.data.bytes()))
    }

    /// The path of the mean that belongs to this variance; no path where it is none.
    fn mean(&self) -> String {
        match self.path.strip_suffix(VARIANCE) {
            Some(module) => format!("{module}{MEAN}"),
            None => String::new(),
        }
    }

    fn values(&self) -> Result<Vec<f64>> {
        let data = self.data.clone().convert_dtype(DType::F64);
        data.try_to_vec().map_err(|_| {
            Error::misuse(format!(
                "`{}` is of {:?}, which is no number",
                self.path,
                self.data.dtype()
            ))
        })
    }
}

/// Gives every float another id. Parameters take it; a running state takes values only, and keeps its own.
struct Renamer;

impl ModuleMapper for Renamer {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, value, mapper) = param.consume();
        Param::from_mapped_value(ParamId::from(!id.val()), value, mapper)
    }
}

/// Maps in the order in which floats are visited.
struct BufferWriter {
    place: usize,
    values: HashMap<usize, TensorData>,
}

impl ModuleMapper for BufferWriter {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let data = self.values.remove(&self.place);
        self.place += 1;
        let Some(data) = data else {
            return param;
        };
        let (id, old, mapper) = param.consume();
        let dtype = old.dtype();
        let new = Tensor::<D>::from_data(data, (&old.device(), dtype));
        Param::from_mapped_value(id, new, mapper)
    }
}

#[derive(Default)]
struct PlainDeviceFinder {
    path: ModulePath,
    place: usize,
    plain: Vec<(usize, String)>,
}

impl ModuleVisitor for PlainDeviceFinder {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.enter(name);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.exit();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        // `lazy_device` draws nothing: lazy parameters are drawn later, in their turn.
        if !param.lazy_device().is_autodiff() {
            self.plain.push((self.place, self.path.as_str().to_owned()));
        }
        self.place += 1;
    }
}
