"""What schemas and tags do not tell of an operator's class, by ATen name."""

from __future__ import annotations


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Made of operators whose flops torch counts, or fused forms of them.
ANCHORS = _names(
    """
    linear matmul mm bmm addmm addbmm baddbmm addmv mv dot vdot inner tensordot einsum bilinear chain_matmul
    linalg_multi_dot _int_mm _grouped_mm _scaled_grouped_mm _addmm_activation conv1d conv2d conv3d conv_transpose1d
    conv_transpose2d conv_transpose3d conv_tbc scaled_dot_product_attention
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_attention_math
    _scaled_dot_product_fused_attention_overrideable
    """
)

# One result for many elements, or every element from all of its row: norms, softmax, pooling, losses.
REDUCTIONS = _names(
    """
    sum nansum mean nanmean prod amax amin aminmax max min all any argmax argmin std var std_mean var_mean logsumexp
    count_nonzero norm linalg_vector_norm frobenius_norm nuclear_norm trace
    softmax _softmax _safe_softmax log_softmax _log_softmax softmin layer_norm native_layer_norm rms_norm
    _fused_rms_norm group_norm native_group_norm instance_norm normalize local_response_norm cosine_similarity
    max_pool1d max_pool2d max_pool3d max_pool2d_with_indices max_pool3d_with_indices avg_pool1d avg_pool2d avg_pool3d
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d
    adaptive_max_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d lp_pool1d lp_pool2d
    mse_loss l1_loss smooth_l1_loss huber_loss nll_loss nll_loss_forward nll_loss2d_forward cross_entropy_loss
    binary_cross_entropy binary_cross_entropy_with_logits kl_div
    """
)

BROADCASTS = _names("expand expand_as broadcast_to broadcast_in_dim outer")

# Every element of the result is one element of an operand.
INJECTIVES = _names(
    """
    cat stack hstack vstack dstack column_stack concat getitem index index_select gather take take_along_dim embedding
    _unsafe_index _unsafe_view unsafe_split unsafe_split_with_sizes unsafe_chunk chunk flip fliplr flipud roll rot90 repeat
    tile repeat_interleave pad constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d
    replication_pad2d replication_pad3d pixel_shuffle pixel_unshuffle channel_shuffle upsample_nearest1d
    upsample_nearest2d upsample_nearest3d triu tril diag diag_embed im2col glu reshape reshape_as view_as flatten unflatten ravel
    movedim moveaxis swapaxes swapdims squeeze unsqueeze transpose permute view narrow select slice split unbind
    numpy_T mT mH select_scatter slice_scatter arange linspace one_hot
    """
)

CASTS = _names(
    "to _to_copy type type_as float double half bfloat16 int long short char byte bool cpu cuda "
    "convert_element_type"
)

# Pointwise without the tag; inference-time batch norm is one too, and so is a dropout.
ELEMENTWISES = CASTS | _names(
    """
    detach alias clone contiguous identity lift lift_fresh lift_fresh_copy copy fill floor_divide prelu _prelu_kernel
    hardswish leaky_relu log_sigmoid log_sigmoid_forward softsign tanhshrink complex polar real imag conj _conj
    dropout native_dropout alpha_dropout bernoulli batch_norm native_batch_norm _native_batch_norm_legit_no_training
    full_like zeros_like ones_like empty_like new_zeros new_ones new_full new_empty scalar_tensor tensor
    truediv eq ne lt le gt ge pos neg abs not_ pow arccos arccosh arcsin arcsinh arctan arctan2 arctanh fix
    """
)

# Draws for each element by itself.
RANDOM_ELEMENTWISE = _names("dropout native_dropout alpha_dropout bernoulli")
