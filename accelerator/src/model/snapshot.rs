use core::fmt;

use burn::module::{Module, ModuleVisitor, Param, Parameter};
use burn::tensor::kind::Basic;
use burn::tensor::{Bool, BoolStore, DType, Int, Tensor, TensorData};

use super::FileLayout;
use super::file_layout::FilePath;

/// The values of a model at one moment, in the order in which Burn visits it.
///
/// Taking one is cheap: it holds the tensors, which nothing changes in place while they are
/// held, and they become bytes when they are written, on whatever thread that is.
#[derive(Debug)]
pub(crate) struct ModelSnapshot {
    entries: Vec<SnapshotEntry>,
}

pub(super) struct SnapshotEntry {
    pub(super) id: u64,
    pub(super) dtype: DType,
    path: String,
    /// The path under PyTorch's conventions.
    pytorch_name: String,
    /// The shape that Burn saves, which is that of the module except for column-major linear layers.
    shape: Vec<usize>,
    pytorch_shape: Vec<usize>,
    /// True for what PyTorch transposes.
    is_linear_weight: bool,
    value: Box<dyn Fn(FileLayout) -> TensorData + Send>,
}

impl ModelSnapshot {
    pub(crate) fn of<M: Module>(model: &M) -> Self {
        let mut entries = Vec::new();
        // `valid` brings running statistics up to date, which are a step behind otherwise.
        visit_entries(&model.valid(), &mut |entry| entries.push(entry));
        Self { entries }
    }

    /// Returns the ids of parameters and buffers, in order.
    #[cfg(test)]
    pub(crate) fn ids(&self) -> Vec<u64> {
        self.entries.iter().map(|entry| entry.id).collect()
    }

    pub(super) fn entries(&self) -> &[SnapshotEntry] {
        &self.entries
    }
}

/// Calls `take` with each parameter and buffer of a model, in the order in which Burn visits them.
pub(super) fn visit_entries<M: Module>(model: &M, take: &mut dyn FnMut(SnapshotEntry)) {
    let place = FilePath::default();
    model.visit(&mut EntryVisitor { place, take });
}

impl SnapshotEntry {
    pub(super) fn name(&self, layout: FileLayout) -> &str {
        match layout {
            FileLayout::Burn => &self.path,
            FileLayout::PyTorch => &self.pytorch_name,
        }
    }

    pub(super) fn shape(&self, layout: FileLayout) -> &[usize] {
        match layout {
            FileLayout::Burn => &self.shape,
            FileLayout::PyTorch => &self.pytorch_shape,
        }
    }

    /// Returns true if a file in that layout has the matrix transposed.
    pub(super) fn is_transposed(&self, layout: FileLayout) -> bool {
        layout == FileLayout::PyTorch && self.is_linear_weight
    }

    /// Returns the values, brought to the host.
    pub(super) fn data(&self, layout: FileLayout) -> TensorData {
        let data = (self.value)(layout);
        match self.dtype {
            // Files have one byte for each.
            DType::Bool(_) => data.convert_dtype(DType::Bool(BoolStore::Native)),
            _ => data,
        }
    }
}

impl fmt::Debug for SnapshotEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SnapshotEntry")
            .field("path", &self.path)
            .field("shape", &self.shape)
            .field("dtype", &self.dtype)
            .finish_non_exhaustive()
    }
}

struct EntryVisitor<'a> {
    place: FilePath,
    take: &'a mut dyn FnMut(SnapshotEntry),
}

impl EntryVisitor<'_> {
    fn visit<const D: usize, K: Basic + 'static>(&mut self, param: &Param<Tensor<D, K>>)
    where
        Tensor<D, K>: Parameter,
    {
        let value = param.val();
        let saved = param.transform_for_save().val();
        let is_linear_weight = D == 2 && self.place.is_linear_weight();
        let mut pytorch_shape = saved.dims().to_vec();
        if is_linear_weight {
            pytorch_shape = value.dims().to_vec();
            pytorch_shape.reverse();
        }
        (self.take)(SnapshotEntry {
            id: param.id.val(),
            dtype: value.dtype(),
            path: self.place.name(FileLayout::Burn),
            pytorch_name: self.place.name(FileLayout::PyTorch),
            shape: saved.dims().to_vec(),
            pytorch_shape,
            is_linear_weight,
            value: Box::new(move |layout| match layout {
                FileLayout::PyTorch if is_linear_weight => value.clone().transpose().into_data(),
                FileLayout::Burn | FileLayout::PyTorch => saved.clone().into_data(),
            }),
        });
    }
}

impl ModuleVisitor for EntryVisitor<'_> {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.place.enter(name, container_type);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.place.exit();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.visit(param);
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.visit(param);
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.visit(param);
    }
}
