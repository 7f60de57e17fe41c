//! Comparison with Burn's own optimizers on random tensors.
#![cfg(feature = "flex")]

use burn::grad_clipping::GradientClippingConfig;
use burn::module::{Param, ParamGroup, ParamId};
use burn::optim::decay::WeightDecayConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamConfig, AdamWConfig, GradientsParams, ModuleOptimizer, SgdConfig};
use burn::tensor::{DType, Device, Tensor, TensorData};
use proptest::prelude::*;

use super::InitFused;

/// Steps a parameter with each of the gradients. Returns its bits after each step, and the final record. Half way, the
/// optimizer is recreated from its record.
fn run(
    make: impl Fn() -> ModuleOptimizer,
    start: &[f64],
    gradients: &[Vec<f64>],
    rates: &[f64],
    dtype: DType,
) -> (Vec<TensorData>, Vec<u8>) {
    let device = Device::flex();
    let tensor = |values: &[f64]| {
        let data = TensorData::new(values.to_vec(), [values.len()]).convert_dtype(dtype);
        Tensor::<1>::from_data(data, (&device, dtype))
    };
    let start = Tensor::<1>::from_inner(tensor(start)).require_grad();
    let mut parameter = Param::initialized(ParamId::from(7), start);
    let mut optimizer = make();
    let mut values = Vec::new();
    for (step, (gradient, rate)) in gradients.iter().zip(rates).enumerate() {
        let mut all = GradientsParams::new();
        all.register(parameter.id, tensor(gradient));
        parameter = optimizer.step(*rate, parameter, all);
        values.push(parameter.val().inner().into_data());
        // Burn loads state in the type of the default device.
        if step == 2 && dtype == DType::F32 {
            let record = optimizer.into_bytes().unwrap();
            optimizer = make().from_bytes(record).unwrap();
        }
    }
    let record = optimizer.into_bytes().unwrap();
    (values, record.to_vec())
}

#[derive(Clone, Debug)]
struct Case {
    start: Vec<f64>,
    gradients: Vec<Vec<f64>>,
    rates: Vec<f64>,
    dtype: DType,
}

fn cases() -> impl Strategy<Value = Case> {
    let number = prop_oneof![
        8 => -2.0..2.0_f64,
        1 => Just(0.0),
        1 => Just(-0.0),
        1 => -1e20..1e20_f64,
        1 => -1e-30..1e-30_f64,
    ];
    let sizes = prop_oneof![1_usize..70, Just(515)];
    let dtype = prop_oneof![3 => Just(DType::F32), 1 => Just(DType::F64), 1 => Just(DType::F16)];
    (sizes, 1_usize..6, dtype).prop_flat_map(move |(size, steps, dtype)| {
        let values = proptest::collection::vec(number.clone(), size);
        let rate = prop_oneof![Just(0.0), 1e-4..0.5_f64];
        (
            values.clone(),
            proptest::collection::vec(values, steps),
            proptest::collection::vec(rate, steps),
        )
            .prop_map(move |(start, gradients, rates)| Case {
                start,
                gradients,
                rates,
                dtype,
            })
    })
}

/// Returns the bits, with one value for all NaNs.
fn bits(data: &TensorData) -> Vec<u64> {
    let one = |value: f64| {
        if value.is_nan() {
            u64::MAX
        } else {
            value.to_bits()
        }
    };
    data.iter::<f64>().map(one).collect()
}

fn compare(
    case: &Case,
    fused: impl Fn() -> ModuleOptimizer,
    burn: impl Fn() -> ModuleOptimizer,
) -> Result<(), TestCaseError> {
    let Case {
        start,
        gradients,
        rates,
        dtype,
    } = case;
    let (ours, our_record) = run(fused, start, gradients, rates, *dtype);
    let (theirs, their_record) = run(burn, start, gradients, rates, *dtype);
    for (step, (ours, theirs)) in ours.iter().zip(&theirs).enumerate() {
        prop_assert_eq!(bits(ours), bits(theirs), "step {}", step);
    }
    // Records are compared unless infinities occur, which lead to NaN.
    if theirs
        .iter()
        .all(|data| data.iter::<f64>().all(f64::is_finite))
    {
        prop_assert_eq!(our_record, their_record);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn adamw_is_burns(
        case in cases(),
        decay in prop_oneof![Just(0.0_f32), 1e-3..0.3_f32],
        cautious: bool,
        amsgrad: bool,
        clip: bool,
    ) {
        let clipping = clip.then_some(GradientClippingConfig::Value(0.5));
        let config = AdamWConfig::new()
            .with_beta_1(0.8)
            .with_epsilon(1e-7)
            .with_weight_decay(decay)
            .with_cautious_weight_decay(cautious)
            .with_amsgrad(amsgrad)
            .with_grad_clipping(clipping);
        compare(&case, || config.init_fused(), || config.init())?;
    }

    #[test]
    fn adam_is_burns(case in cases(), decay in proptest::option::of(0.0..0.3_f32), amsgrad: bool) {
        let decay = decay.map(WeightDecayConfig::new);
        let config = AdamConfig::new()
            .with_beta_2(0.99)
            .with_weight_decay(decay)
            .with_amsgrad(amsgrad);
        compare(&case, || config.init_fused(), || config.init())?;
    }

    #[test]
    fn sgd_is_burns(
        case in cases(),
        decay in proptest::option::of(0.0..0.3_f32),
        momentum in proptest::option::of((0.0..0.99_f64, 0.0..0.5_f64, any::<bool>())),
    ) {
        let momentum = momentum.map(|(factor, dampening, nesterov)| MomentumConfig {
            momentum: factor,
            dampening,
            nesterov,
        });
        let config = SgdConfig::new()
            .with_weight_decay(decay.map(WeightDecayConfig::new))
            .with_momentum(momentum);
        compare(&case, || config.init_fused(), || config.init())?;
    }
}

#[test]
fn settings_are_read_and_not_guessed() {
    // Burn's own operations would give the same bits and leave this crate's loops unused.
    let adam: Option<serde_json::Value> = super::step::settings(&AdamConfig::new());
    assert!(adam.is_some_and(|told| told["beta_1"].is_number()));
    let tensor = Tensor::<1>::zeros([3], &Device::flex());
    assert_eq!(
        super::step::KernelInput::of(&[&tensor]),
        super::step::KernelInput::F32
    );
    assert!(super::adam::FusedAdam::new(&AdamConfig::new()).is_fused());
    assert!(super::adam::FusedAdamW::new(&AdamWConfig::new()).is_fused());
    assert!(super::sgd::FusedSgd::new(&SgdConfig::new()).is_fused());
}

/// Steps that Burn's operations do instead of the loops.
mod beyond_the_loops {
    use burn::nn::{Linear, LinearConfig};
    use burn::optim::Optimizer;

    use super::super::sgd::FusedSgd;
    use super::*;
    use crate::optim::fused::step::KernelInput;

    fn momentum(nesterov: bool) -> MomentumConfig {
        MomentumConfig {
            momentum: 0.9,
            dampening: 0.1,
            nesterov,
        }
    }

    /// Returns configurations with every setting, with momentum or decay alone, and with none.
    fn configs() -> [SgdConfig; 4] {
        let with = |decay, momentum| {
            SgdConfig::new()
                .with_weight_decay(decay)
                .with_momentum(momentum)
        };
        [
            with(Some(WeightDecayConfig::new(0.05)), Some(momentum(true))),
            with(Some(WeightDecayConfig::new(0.05)), None),
            with(None, Some(momentum(false))),
            with(None, None),
        ]
    }

    fn case(dtype: DType) -> Case {
        let values = |seed: usize| -> Vec<f64> {
            (0..67)
                .map(|at| ((at + 67 * seed) as f64 * 1.7).sin())
                .collect()
        };
        Case {
            start: values(0),
            gradients: (1..=5).map(values).collect(),
            rates: vec![0.1, 0.2, 0.0, 0.3, 0.05],
            dtype,
        }
    }

    #[test]
    fn half_precision_is_out_of_reach_and_has_burns_bits() {
        for dtype in [DType::F16, DType::BF16] {
            let device = Device::flex();
            let half = Tensor::<1>::zeros([3], (&device, dtype));
            assert_eq!(KernelInput::of(&[&half]), KernelInput::None);
            for config in configs() {
                compare(&case(dtype), || config.init_fused(), || config.init()).unwrap();
            }
        }
    }

    #[test]
    fn tensors_of_two_types_are_out_of_reach() {
        let device = Device::flex();
        let tensor = |dtype| Tensor::<1>::zeros([3], (&device, dtype));
        let (single, double) = (tensor(DType::F32), tensor(DType::F64));
        assert_eq!(KernelInput::of(&[&single, &double]), KernelInput::None);
        assert_eq!(KernelInput::of(&[&double, &double]), KernelInput::F64);
    }

    #[test]
    fn settings_that_cannot_be_read_leave_the_step_to_burn() {
        for config in configs() {
            let unread = || {
                let fused = FusedSgd::unread(&config);
                assert!(!fused.is_fused());
                ModuleOptimizer::from(fused)
            };
            for dtype in [DType::F32, DType::F64, DType::F16] {
                // In `f32`, it is recreated from its record half way.
                compare(&case(dtype), unread, || config.init()).unwrap();
            }
        }
    }

    /// Steps a linear layer four times and returns its bits.
    fn grouped<O: Optimizer>(optimizer: ModuleOptimizer, biases: O) -> Vec<TensorData> {
        let device = Device::flex().autodiff();
        let mut model: Linear = LinearConfig::new(5, 3).init(&device);
        let ids = [ParamId::from(1), ParamId::from(2)];
        let values = |seed: usize, count: usize| -> Vec<f32> {
            (0..count)
                .map(|at| ((at + 11 * seed) as f32 * 0.7).cos())
                .collect()
        };
        let matrix = |seed| TensorData::new(values(seed, 15), [5, 3]);
        let row = |seed| TensorData::new(values(seed, 3), [3]);
        let weight = Tensor::<2>::from_data(matrix(0), &device).require_grad();
        model.weight = Param::initialized(ids[0], weight);
        let bias = Tensor::<1>::from_data(row(0), &device).require_grad();
        model.bias = Some(Param::initialized(ids[1], bias));
        let group = ParamGroup::from_predicate("bias");
        let mut optimizer = optimizer.with_group(group, biases, None);
        let plain = Device::flex();
        let mut bits = Vec::new();
        for step in 1..5 {
            let mut gradients = GradientsParams::new();
            gradients.register(ids[0], Tensor::<2>::from_data(matrix(step), &plain));
            gradients.register(ids[1], Tensor::<1>::from_data(row(step), &plain));
            model = optimizer.step(0.1, model, gradients);
            bits.push(model.weight.val().inner().into_data());
            bits.push(model.bias.as_ref().unwrap().val().inner().into_data());
        }
        bits
    }

    #[test]
    fn groups_have_burns_bits_each_by_its_own_settings() {
        let [all, ..] = configs();
        for biases in configs() {
            let burn = grouped(all.init(), biases.build());
            assert_eq!(grouped(all.init_fused(), biases.build_fused()), burn);
            // Fused optimizers and Burn's can be combined in either order.
            assert_eq!(grouped(all.init_fused(), biases.build()), burn);
            assert_eq!(grouped(all.init(), biases.build_fused()), burn);
            // The settings of this one cannot be read.
            assert_eq!(grouped(all.init_fused(), FusedSgd::unread(&biases)), burn);
        }
        let [_, plain, ..] = configs();
        let other = grouped(all.init_fused(), plain.build_fused());
        let same = grouped(all.init_fused(), all.build_fused());
        assert_ne!(other, same, "the group's settings count");
    }
}
