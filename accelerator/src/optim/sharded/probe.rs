use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, TensorData};

use super::param_shards::ParamShards;
use crate::core::tensor_rank::{from_data, register};
use crate::model::Trainable;

/// Elements of the tensor that is stepped: 8 rows and 6 columns, where there are two dimensions.
const ELEMENTS: usize = 48;
/// The sizes of the gradients of the steps: an optimizer that clips by itself does so at one of them.
const SCALES: [f64; 3] = [1.0, 1e-3, 1e3];

/// Returns `true` if an optimizer without state steps each element of a parameter by itself: a small tensor in
/// its place comes out the same, bit for bit, as a whole and in pieces.
///
/// Numbers are fixed, but processors with other vectors may round otherwise: one rank asks, and tells the others.
pub(super) fn is_element_wise(
    blank: &ModuleOptimizer,
    parameter: &Trainable,
    device: &Device,
) -> bool {
    // It may be by norm, for a group that cannot be asked for.
    if blank.has_gradient_clipping() {
        return false;
    }
    let probe = || {
        let run = |from, to| run(&mut blank.clone(), parameter, device, from, to);
        let whole = run(0, ELEMENTS);
        whole == [run(0, 10), run(10, 33), run(33, ELEMENTS)].concat()
    };
    // An optimizer may refuse a shape.
    catch_unwind(AssertUnwindSafe(probe)).unwrap_or(false)
}

/// An optimizer without state, after it has stepped a small tensor in the place of a parameter; `None` if it
/// does not step such tensors.
pub(in crate::optim) fn step_sample(
    blank: &ModuleOptimizer,
    parameter: &Trainable,
    device: &Device,
) -> Option<ModuleOptimizer> {
    let mut optimizer = blank.clone();
    let probe = || run(&mut optimizer, parameter, device, 0, ELEMENTS);
    // An optimizer may refuse a shape.
    let stepped = catch_unwind(AssertUnwindSafe(probe));
    stepped.ok().map(|_| optimizer)
}

/// The values of elements `from` to `to` after three steps.
fn run(
    optimizer: &mut ModuleOptimizer,
    parameter: &Trainable,
    device: &Device,
    from: usize,
    to: usize,
) -> Vec<u8> {
    let mut shape = vec![1; parameter.shape.len().max(1)];
    if to - from == ELEMENTS && shape.len() > 1 {
        (shape[0], shape[1]) = (8, ELEMENTS / 8);
    } else {
        shape[0] = to - from;
    }
    let (id, dtype) = (parameter.id, parameter.float.dtype());
    let tensor = |seed: u64, scale: f64| {
        let values: Vec<f64> = (from..to).map(|at| scale * noise(seed, at)).collect();
        let data = TensorData::new(values, shape.clone()).convert_dtype(dtype);
        from_data(data, device)
    };
    let start = tensor(0, 1.0);
    let mut shards = ParamShards::one(id, &parameter.path, shape.clone(), start);
    for (step, scale) in (1..).zip(SCALES) {
        let mut gradients = GradientsParams::new();
        register(&mut gradients, id, tensor(step, scale));
        shards = optimizer.step(0.01, shards, gradients);
    }
    let values = shards.into_bytes().flat_map(|(_, bytes)| bytes.to_vec());
    values.collect()
}

/// A number between -1 and 1 that depends on nothing else: Knuth's multiplicative hash, twice.
fn noise(seed: u64, at: usize) -> f64 {
    let mut bits = (seed << 32) + at as u64 + 1;
    for _ in 0..2 {
        bits = bits.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        bits ^= bits >> 29;
    }
    (bits >> 11) as f64 / (1_u64 << 52) as f64 - 1.0
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn::grad_clipping::GradientClippingConfig;
    use burn::module::{ParamGroup, ParamId};
    use burn::optim::momentum::MomentumConfig;
    use burn::optim::{
        AdaGradConfig, AdafactorConfig, AdamConfig, AdamWConfig, AdanConfig, LambConfig,
        LionConfig, MuonConfig, RmsPropConfig, SgdConfig,
    };

    use super::*;
    use crate::model::Float;
    use crate::optim::InitFused;
    use crate::optim::unsharded::is_fused;

    fn is_cut(optimizer: ModuleOptimizer, path: &str, shape: &[usize], float: Float) -> bool {
        let parameter = Trainable {
            id: ParamId::new(),
            path: path.to_owned(),
            shape: shape.to_vec(),
            float,
        };
        is_element_wise(&optimizer, &parameter, &Device::flex())
    }

    #[test]
    fn burns_optimizers_are_told_apart() {
        let momentum = SgdConfig::new().with_momentum(Some(MomentumConfig::new()));
        let by_element: [(&str, ModuleOptimizer); 9] = [
            ("adagrad", AdaGradConfig::new().init()),
            ("adam", AdamConfig::new().init()),
            ("adamw", AdamWConfig::new().init()),
            ("adan", AdanConfig::new().init()),
            ("fused", AdamWConfig::new().init_fused()),
            ("lion", LionConfig::new().init()),
            ("momentum", momentum.init()),
            ("rmsprop", RmsPropConfig::new().init()),
            ("sgd", SgdConfig::new().init()),
        ];
        for (name, optimizer) in by_element {
            for float in [Float::F32, Float::F64] {
                for shape in [&[300][..], &[30, 10], &[5, 6, 10]] {
                    assert!(
                        is_cut(optimizer.clone(), "", shape, float),
                        "{name} {shape:?}"
                    );
                }
            }
        }
        let whole: [(&str, ModuleOptimizer); 4] = [
            ("adafactor", AdafactorConfig::new().init()),
            ("lamb", LambConfig::new().init()),
            ("muon", MuonConfig::new().init()),
            (
                "clipped",
                AdamWConfig::new()
                    .with_grad_clipping(Some(GradientClippingConfig::Norm(1.0)))
                    .init(),
            ),
        ];
        for (name, optimizer) in whole {
            assert!(!is_cut(optimizer, "", &[30, 10], Float::F32), "{name}");
        }
    }

    #[test]
    fn what_is_fused_is_found_out() {
        let fused = || AdamWConfig::new().init_fused();
        let group = ParamGroup::from_predicate("special");
        let sgd = SgdConfig::new().build();
        let clipping = GradientClippingConfig::Norm(1.0);
        let cases = [
            (fused(), "layer.weight", Float::F32, true),
            (fused(), "layer.weight", Float::F64, true),
            // Burn's operations, with gradients of that type.
            (fused(), "layer.weight", Float::F16, false),
            (SgdConfig::new().init_fused(), "", Float::F32, true),
            (SgdConfig::new().init(), "", Float::F32, false),
            (
                fused().with_group(group, sgd, None),
                "special",
                Float::F32,
                false,
            ),
            // It clips the gradient itself.
            (
                fused().with_grad_clipping(clipping.init()),
                "",
                Float::F32,
                false,
            ),
        ];
        for (optimizer, path, float, expected) in cases {
            let parameter = Trainable {
                id: ParamId::new(),
                path: path.to_owned(),
                shape: vec![30, 10],
                float,
            };
            let found = is_fused(&optimizer, &parameter, &Device::flex());
            assert_eq!(found, expected, "{path} {float:?}");
        }
    }

    #[test]
    fn a_group_is_asked_for_its_own() {
        let group = ParamGroup::from_predicate("special");
        let optimizer = || {
            let lamb = LambConfig::new().build();
            SgdConfig::new()
                .init()
                .with_group(group.clone(), lamb, None)
        };
        assert!(is_cut(optimizer(), "layer.weight", &[30, 10], Float::F32));
        assert!(!is_cut(
            optimizer(),
            "special.weight",
            &[30, 10],
            Float::F32
        ));
    }
}
