use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::nn::transformer::{TransformerEncoderConfig, TransformerEncoderLayer};
use burn::nn::{
    BatchNorm, BatchNormConfig, Dropout, DropoutConfig, Embedding, EmbeddingConfig, Linear,
    LinearConfig, LinearLayout,
};
use burn::tensor::{Bool, Device, Distribution, Gradients, Int, Tensor, TensorData};

use super::{Unit, Units, prepare, recompute};
use crate::core::device::tests::devices;
use crate::core::draws;
use crate::core::dyn_module::BoxedModule;
use crate::core::error::panic_text;

/// The units of a model, prepared.
fn with<M: Module + 'static>(units: Units, model: &M) -> M {
    prepare(BoxedModule::new(model.clone()), units)
        .0
        .into_model()
}

/// The values of a model's parameters, which draws those that are lazy.
fn values<M: Module>(model: &M) -> Vec<TensorData> {
    struct Values(Vec<TensorData>);
    impl ModuleVisitor for Values {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0.push(param.val().into_data());
        }
    }
    let mut values = Values(Vec::new());
    model.visit(&mut values);
    values.0
}

/// The gradients of a model's parameters; `None` for one that has none.
fn gradients<M: Module>(model: &M, gradients: &mut Gradients) -> Vec<Option<TensorData>> {
    struct Found<'a>(&'a mut Gradients, Vec<Option<TensorData>>);
    impl ModuleVisitor for Found<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let gradient = match param.is_require_grad() {
                true => param.val().grad(self.0).map(Tensor::into_data),
                false => None,
            };
            self.1.push(gradient);
        }
    }
    let mut found = Found(gradients, Vec::new());
    model.visit(&mut found);
    found.1
}

fn gradients_of<M: Module, const D: usize>(
    model: &M,
    output: Tensor<D>,
) -> Vec<Option<TensorData>> {
    gradients(model, &mut output.sum().backward())
}

fn close(one: &[Option<TensorData>], other: &[Option<TensorData>]) {
    assert_eq!(one.len(), other.len());
    for (one, other) in one.iter().zip(other) {
        match (one, other) {
            (Some(one), Some(other)) => one.assert_approx_eq::<f32>(other, Default::default()),
            (one, other) => assert_eq!(one, other),
        }
    }
}

fn random<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D> {
    Tensor::random(shape, Distribution::Default, device)
}

#[derive(Module, Debug)]
struct Gpt {
    embedding: Unit<Embedding>,
    layers: Vec<Unit<TransformerEncoderLayer>>,
}

impl Gpt {
    fn new(device: &Device) -> Self {
        let config = TransformerEncoderConfig::new(8, 16, 2, 12).with_dropout(0.0);
        let layer = || Unit::new(TransformerEncoderLayer::new(&config, device));
        let model = Self {
            embedding: Unit::new(EmbeddingConfig::new(11, 8).init(device)),
            layers: (0..12).map(|_| layer()).collect(),
        };
        values(&model);
        model
    }

    fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let mut x: Tensor<3> = self.embedding.run(tokens, Embedding::forward);
        for layer in &self.layers {
            x = layer.run(x, |layer, x| layer.forward(x, None, None));
        }
        x
    }

    fn forward_plain(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let mut x: Tensor<3> = self.embedding.block.forward(tokens);
        for layer in &self.layers {
            x = layer.block.forward(x, None, None);
        }
        x
    }
}

#[test]
fn gradients_have_the_bits_of_plain_burn_whatever_units_do() {
    for device in devices() {
        let plain = Gpt::new(&device);
        // Of 32 rows, Burn's `linear` takes a view of its weight.
        for length in [3, 16] {
            let tokens = (0..2 * length).map(|at| (at * 7 % 11) as i64);
            let tokens = TensorData::new(tokens.collect::<Vec<_>>(), [2, length]);
            let tokens = Tensor::<2, Int>::from_data(tokens, &device);
            let output = plain.forward_plain(tokens.clone());
            let expected = (output.to_data(), gradients_of(&plain, output));
            assert_eq!(expected.1.iter().flatten().count(), 193);
            for units in Units::ALL {
                let model = with(units, &plain);
                let output = model.forward(tokens.clone());
                let found = (output.to_data(), gradients_of(&model, output));
                assert!(found == expected, "{units}, {device:?}");
            }
        }
    }
}

#[derive(Module, Debug)]
struct Two {
    a: Linear,
    b: Linear,
    unused: Linear,
}

type Inputs = (Tensor<2>, Option<Tensor<3>>, [Tensor<2, Bool>; 1]);

impl Two {
    fn forward(&self, (x, y, [mask]): Inputs) -> (Tensor<2>, Vec<Tensor<1>>) {
        let h = self.a.forward(x.clone()).tanh().mask_fill(mask, 0.5);
        let y = y.map_or_else(|| x.clone(), |y| y.mean_dim(1).squeeze_dim(1));
        let z = self.b.forward(y) * x;
        (
            h.clone() * z.clone(),
            vec![z.clone().sum(), h.sum(), z.max()],
        )
    }
}

#[test]
fn a_block_has_several_inputs_and_outputs_of_which_some_are_not_used() {
    for device in devices() {
        let layer = |outputs| LinearConfig::new(5, outputs).init(&device);
        let col = LinearConfig::new(5, 5).with_layout(LinearLayout::Col);
        let block = Two {
            a: layer(5),
            b: col.init(&device),
            unused: layer(2),
        };
        values(&block);
        let x = random([3, 5], &device).require_grad();
        let y = random([3, 4, 5], &device).require_grad();
        let mask = random([3, 5], &device).greater_elem(0.7);
        let run = |recomputed: bool| {
            let x2 = x.clone() * 2.0;
            let input = (x2.clone(), Some(y.clone().exp()), [mask.clone()]);
            let (output, sums) = match recomputed {
                true => recompute(&block, input, Two::forward),
                false => block.forward(input),
            };
            let loss = (output * x2).sum() + sums[0].clone().powi_scalar(2);
            let mut all = loss.backward();
            let mut found = gradients(&block, &mut all);
            found.push(x.grad(&all).map(Tensor::into_data));
            found.push(y.grad(&all).map(Tensor::into_data));
            found
        };
        let found = run(true);
        assert!(
            found[4].is_none() && found[5].is_none(),
            "of what is not used"
        );
        close(&found, &run(false));
    }
}

#[test]
fn a_parameter_may_be_in_two_places_and_in_two_blocks() {
    for device in devices() {
        let linear: Linear = LinearConfig::new(4, 4).init(&device);
        values(&linear);
        let block = [linear.clone(), linear.clone()];
        let x = random([3, 4], &device);
        let twice = |[a, b]: &[Linear; 2], x| b.forward(a.forward(x).tanh()).tanh();
        let expected = gradients_of(&linear, twice(&block, twice(&block, x.clone())));
        let found = recompute(&block, recompute(&block, x, twice), twice);
        close(&gradients_of(&linear, found), &expected);
    }
}

#[derive(Module, Debug)]
struct Inner {
    linear: Linear,
    dropout: Dropout,
}

impl Inner {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.dropout.forward(self.linear.forward(x)).tanh()
    }
}

#[derive(Module, Debug)]
struct Outer {
    first: Inner,
    within: Unit<Inner>,
    last: Inner,
}

#[test]
fn units_may_be_in_units() {
    for device in devices() {
        let inner = || Inner {
            linear: LinearConfig::new(6, 6).init(&device),
            dropout: DropoutConfig::new(0.0).init(),
        };
        let plain = Unit::new(Outer {
            first: inner(),
            within: Unit::new(inner()),
            last: inner(),
        });
        values(&plain);
        let x = random([3, 6], &device).require_grad();
        let run = |units| {
            let outer = with(units, &plain);
            let output = outer.run(x.clone(), |outer, x| {
                let x = outer.within.run(outer.first.forward(x), Inner::forward);
                outer.last.forward(x)
            });
            let mut all = output.sum().backward();
            let mut found = gradients(&outer, &mut all);
            found.push(x.grad(&all).map(Tensor::into_data));
            found
        };
        let expected = run(Units::Plain);
        assert_eq!(expected.iter().flatten().count(), 7);
        assert!(run(Units::Keep) == expected && run(Units::Recompute) == expected);
    }
}

#[derive(Module, Debug)]
struct Normed {
    linear: Linear,
    norm: BatchNorm,
    /// It does not normalise by the batch, whatever is trained.
    fixed: BatchNorm,
    columns: Param<Tensor<1, Int>>,
    scale: Tensor<1>,
}

impl Normed {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let x = self.norm.forward(self.linear.forward(x));
        let x = self.fixed.forward(x).tanh() * self.scale.clone().unsqueeze();
        x.select(1, self.columns.val())
    }
}

#[test]
fn running_statistics_move_once_a_step_and_flags_stay() {
    for device in devices() {
        let norm = || -> BatchNorm { BatchNormConfig::new(4).init(&device) };
        let model = || {
            let mut model = Normed {
                linear: LinearConfig::new(4, 4).init(&device),
                norm: norm(),
                fixed: norm(),
                columns: Param::initialized(ParamId::new(), Tensor::from_data([3, 0], &device)),
                scale: Tensor::from_floats([1.0, 2.0, 0.5, 3.0], &device),
            };
            model.fixed.training = model.fixed.training.with_value(false);
            model
        };
        let plain = model();
        let other = model().load_record(plain.clone().into_record());
        for _ in 0..3 {
            let x = random([8, 4], &device);
            let expected = gradients_of(&plain, plain.forward(x.clone()));
            let found = gradients_of(&other, recompute(&other, x, Normed::forward));
            close(&found, &expected);
        }
        let (expected, found) = (values(&plain.valid()), values(&other.valid()));
        assert_eq!(found, expected);
        let mean = plain.valid().norm.running_mean.value();
        assert!(mean.abs().sum().into_scalar::<f32>() > 1e-3, "they move");
    }
}

/// Parameters that are made of others in the graph, as those of a working copy in half precision are.
struct Scale;

impl ModuleMapper for Scale {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, value, mapper) = param.consume();
        Param::from_mapped_value(id, value * 1.5, mapper)
    }
}

#[test]
fn parameters_may_be_made_of_others() {
    for device in devices() {
        let linear = || -> Linear { LinearConfig::new(4, 4).init(&device) };
        let pair = [linear(), linear()];
        values(&pair);
        let x = random([3, 4], &device);
        let forward = |pair: &[Linear; 2], x| pair[0].forward(x).tanh();
        let expected = gradients_of(
            &pair,
            forward(&Module::map(pair.clone(), &mut Scale), x.clone()),
        );
        let output = recompute(&Module::map(pair.clone(), &mut Scale), x, forward);
        let found = gradients_of(&pair, output);
        close(&found[..2], &expected[..2]);
        for unused in &found[2..] {
            let zeros = unused
                .as_ref()
                .is_some_and(|unused| unused.iter::<f32>().all(|value| value == 0.0));
            assert!(zeros, "zeros for what is not used");
        }
    }
}

#[test]
fn gradients_pass_through_frozen_blocks_and_stop_at_untracked_inputs() {
    for device in devices() {
        let linear = || -> Linear { LinearConfig::new(4, 4).init(&device) };
        let pair = [linear(), linear().no_grad()];
        values(&pair);
        let x = random([3, 4], &device);
        let forward = |linear: &Linear, x| linear.forward(x).tanh();
        let expected = gradients_of(&pair, forward(&pair[1], forward(&pair[0], x.clone())));
        let h = recompute(&pair[0], x.clone(), forward);
        let found = gradients_of(&pair, recompute(&pair[1], h, forward));
        assert_eq!(found, expected);
        assert!(found[2].is_none());
        assert!(!recompute(&pair[1], x, forward).is_tracked());
    }
}

#[test]
fn an_input_that_a_block_does_not_use_passes_nothing_on() {
    for device in devices() {
        let linear: Linear = LinearConfig::new(4, 4).init(&device);
        values(&linear);
        let x = random([3, 4], &device).require_grad();
        let gradient = |output: Tensor<2>| {
            let all = output.sum().backward();
            x.grad(&all).map(Tensor::into_data)
        };
        let expected = gradient(linear.forward(x.clone()));
        let input = (x.clone().tanh(), x.clone());
        let output = recompute(&linear, input, |linear, (_, x)| linear.forward(x));
        close(&[gradient(output)], &[expected]);
    }
}

#[test]
fn a_closure_that_brings_a_tensor_of_the_graph_is_told_in_forward() {
    for device in devices() {
        let linear: Linear = LinearConfig::new(4, 4).init(&device);
        let other = random([3, 4], &device).require_grad();
        let x = random([3, 4], &device);
        let panic = catch_unwind(AssertUnwindSafe(|| {
            let other = other.clone();
            recompute(&linear, x.clone(), move |linear, x| {
                linear.forward(x) * other.clone()
            })
        }));
        let text = panic_text(&*panic.unwrap_err());
        assert!(text.contains("pass it in the block's input"), "{text}");
        // What does not ask for a gradient may be brought along.
        let other = other.set_require_grad(false);
        let output = recompute(&linear, x, move |linear, x| {
            linear.forward(x) * other.clone()
        });
        assert!(gradients_of(&linear, output).iter().all(Option::is_some));
    }
}

#[test]
fn losses_are_added_and_go_backward_one_after_the_other() {
    for device in devices() {
        let linear: Linear = LinearConfig::new(4, 4).init(&device);
        values(&linear);
        let forward = |linear: &Linear, x| linear.forward(x).tanh();
        let (x, y) = (random([3, 4], &device), random([3, 4], &device));
        let plain = |x: &Tensor<2>| forward(&linear, x.clone()).sum();
        let unit = |x: &Tensor<2>| recompute(&linear, x.clone(), forward).sum();
        close(
            &gradients_of(&linear, unit(&x) + unit(&y)),
            &gradients_of(&linear, plain(&x) + plain(&y)),
        );
        let (one, other) = (unit(&x), unit(&y));
        assert_eq!(gradients_of(&linear, one), gradients_of(&linear, plain(&x)));
        assert_eq!(
            gradients_of(&linear, other),
            gradients_of(&linear, plain(&y))
        );
        let (unit, plain) = (unit(&x), plain(&x));
        close(
            &gradients_of(&linear, unit.clone() + unit),
            &gradients_of(&linear, plain.clone() + plain),
        );
    }
}

#[test]
fn a_forward_that_is_abandoned_and_a_panic_of_a_second_run_leave_nothing_behind() {
    for device in devices() {
        let linear: Linear = LinearConfig::new(4, 4).init(&device);
        values(&linear);
        let step = || {
            let kept = Arc::new(());
            let held = Arc::downgrade(&kept);
            let output = recompute(
                &linear,
                random([3, 4], &device),
                move |linear: &Linear, x| {
                    let _kept = &kept;
                    linear.forward(x).tanh()
                },
            );
            (output, held)
        };
        let (output, abandoned) = step();
        drop(output);
        let (output, held) = step();
        assert!(held.upgrade().is_some(), "for the second run");
        let expected = gradients_of(&linear, output);
        assert!(expected.iter().all(Option::is_some));
        assert!(abandoned.upgrade().is_none() && held.upgrade().is_none());

        let runs = Arc::new(AtomicUsize::new(0));
        let counted = runs.clone();
        let output = recompute(
            &linear,
            random([3, 4], &device),
            move |linear: &Linear, x| {
                assert!(
                    counted.fetch_add(1, Ordering::Relaxed) == 0,
                    "the second run"
                );
                linear.forward(x)
            },
        );
        let panic = catch_unwind(AssertUnwindSafe(|| output.sum().backward()));
        assert!(panic_text(&*panic.err().unwrap()).contains("the second run"));
        assert!(!super::runs_twice() && !draws::is_drawing());
        let (output, held) = step();
        assert!(gradients_of(&linear, output).iter().all(Option::is_some));
        assert!(held.upgrade().is_none() && Arc::strong_count(&runs) == 1);
    }
}

#[test]
fn a_tensor_that_is_used_within_and_outside_of_a_block_has_all_of_its_gradient() {
    for device in devices() {
        let linear: Linear = LinearConfig::new(4, 4).init(&device);
        values(&linear);
        let x = random([3, 4], &device).require_grad();
        let thrice = |linear: &Linear, x: Tensor<2>| {
            linear.forward(x.clone()).tanh() * x.clone() + linear.forward(x).exp()
        };
        let run = |block: &dyn Fn(Tensor<2>) -> Tensor<2>| {
            let h = x.clone() * 2.0;
            let mut all = (h.clone() + block(h)).sum().backward();
            let mut found = gradients(&linear, &mut all);
            found.push(x.grad(&all).map(Tensor::into_data));
            found
        };
        // Of the same sum, in another order.
        close(
            &run(&|h| recompute(&linear, h, thrice)),
            &run(&|h| thrice(&linear, h)),
        );
    }
}

#[test]
fn a_closure_that_returns_something_else_the_second_time_is_told_in_backward() {
    for device in devices() {
        let linear: Linear = LinearConfig::new(4, 4).init(&device);
        let runs = AtomicUsize::new(0);
        let outputs = recompute(&linear, random([3, 4], &device), move |linear, x| {
            let y: Tensor<2> = linear.forward(x);
            match runs.fetch_add(1, Ordering::Relaxed) {
                0 => vec![y],
                _ => vec![y.clone(), y],
            }
        });
        let panic = catch_unwind(AssertUnwindSafe(|| outputs[0].clone().sum().backward()));
        let text = panic_text(&*panic.err().unwrap());
        assert!(text.contains("must compute the same each time"), "{text}");
    }
}

#[test]
fn values_that_are_not_finite_travel_as_in_plain_burn() {
    for device in devices() {
        let linear: Linear = LinearConfig::new(2, 2).init(&device);
        values(&linear);
        let x = Tensor::<2>::from_data([[f32::NAN, 1.0], [2.0, f32::INFINITY]], &device);
        let expected = gradients_of(&linear, linear.forward(x.clone()));
        let found = gradients_of(&linear, recompute(&linear, x, Linear::forward));
        for (found, expected) in found.iter().zip(&expected) {
            let bits = |data: &Option<TensorData>| -> Vec<u32> {
                let data = data.as_ref().unwrap();
                data.iter::<f32>()
                    .map(|value| value.to_bits() & 0x7fff_ffff)
                    .collect()
            };
            assert_eq!(bits(found), bits(expected));
        }
    }
}

#[test]
fn a_unit_has_the_paths_the_ids_and_the_text_of_its_block() {
    struct Paths(Vec<String>, Vec<String>);
    impl ModuleVisitor for Paths {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.1.push(format!("{} {}", self.0.join("."), param.id));
        }
        fn enter_module(&mut self, name: &str, _: &str) {
            self.0.push(name.to_owned());
        }
        fn exit_module(&mut self, _: &str, _: &str) {
            self.0.pop();
        }
    }
    let paths = |model: &dyn Fn(&mut Paths)| {
        let mut paths = Paths(Vec::new(), Vec::new());
        model(&mut paths);
        paths.1
    };
    let device = devices().swap_remove(0);
    let block = Inner {
        linear: LinearConfig::new(3, 3).init(&device),
        dropout: DropoutConfig::new(0.5).init(),
    };
    let unit = Unit::new(block.clone());
    let prepared = with(Units::Recompute, &unit);
    let expected = paths(&|paths| block.visit(paths));
    assert_eq!(expected.len(), 2);
    assert_eq!(paths(&|paths| unit.visit(paths)), expected);
    assert_eq!(
        paths(&|paths| prepared.valid().train().visit(paths)),
        expected
    );
    assert_eq!(unit.to_string(), block.to_string());
    assert_eq!(unit.num_params(), block.num_params());
}
