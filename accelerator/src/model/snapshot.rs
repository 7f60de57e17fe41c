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
    value: Box<dyn Fn(FileLayout) -> TensorData + Send>,
}

impl ModelSnapshot {
    pub(crate) fn of<M: Module>(model: &M) -> Self {
        let mut reader = SnapshotReader::default();
        // `valid` brings running statistics up to date, which are a step behind otherwise.
        model.valid().visit(&mut reader);
        Self {
            entries: reader.entries,
        }
    }

    /// The ids of parameters and buffers, in order.
    #[cfg(test)]
    pub(crate) fn ids(&self) -> Vec<u64> {
        self.entries.iter().map(|entry| entry.id).collect()
    }

    pub(super) fn entries(&self) -> &[SnapshotEntry] {
        &self.entries
    }
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

    /// The values, brought to the host.
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

#[derive(Default)]
struct SnapshotReader {
    place: FilePath,
    entries: Vec<SnapshotEntry>,
}

impl SnapshotReader {
    fn push<const D: usize, K: Basic + 'static>(&mut self, param: &Param<Tensor<D, K>>)
    where
        Tensor<D, K>: Parameter,
    {
        let value = param.val();
        let saved = param.transform_for_save().val();
        let turned = D == 2 && self.place.is_linear_weight();
        let mut pytorch_shape = saved.dims().to_vec();
        if turned {
            pytorch_shape = value.dims().to_vec();
            pytorch_shape.reverse();
        }
        self.entries.push(SnapshotEntry {
            id: param.id.val(),
            dtype: value.dtype(),
            path: self.place.name(FileLayout::Burn),
            pytorch_name: self.place.name(FileLayout::PyTorch),
            shape: saved.dims().to_vec(),
            pytorch_shape,
            value: Box::new(move |layout| match layout {
                FileLayout::PyTorch if turned => value.clone().transpose().into_data(),
                FileLayout::Burn | FileLayout::PyTorch => saved.clone().into_data(),
            }),
        });
    }
}

impl ModuleVisitor for SnapshotReader {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.place.enter(name, container_type);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.place.exit();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.push(param);
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.push(param);
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.push(param);
    }
}
