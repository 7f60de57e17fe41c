use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{DType, Tensor};

use crate::core::module_path::ModulePath;

/// The values of all parameters that are floats, by their paths.
pub(crate) fn float_values<M: Module>(model: &M) -> Vec<(String, Vec<f32>)> {
    let mut reader = ValueReader {
        path: ModulePath::default(),
        values: Vec::new(),
    };
    model.visit(&mut reader);
    reader.values
}

struct ValueReader {
    path: ModulePath,
    values: Vec<(String, Vec<f32>)>,
}

impl ModuleVisitor for ValueReader {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.enter(name);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.exit();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let data = param.val().into_data().convert_dtype(DType::F32);
        // It is of that type now.
        let values = data.try_to_vec().unwrap_or_default();
        self.values.push((self.path.as_str().to_owned(), values));
    }
}
