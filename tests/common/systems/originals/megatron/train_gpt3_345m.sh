# A run of GPT in the words that Megatron-LM has now.
torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py \
    --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 \
    --max-position-embeddings 1024 --attention-backend auto --use-mcore-models \
    --micro-batch-size 4 --global-batch-size 32 --train-samples 16000000 \
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 --clip-grad 1.0 \
    --bf16 --lr 6.0e-4 --lr-decay-style cosine --min-lr 6.0e-5 --lr-warmup-fraction .001 \
    --lr-decay-iters 430000 --grad-reduce-in-bf16 --calculate-per-token-loss \
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel \
    --num-virtual-stages-per-pipeline-rank 2 --use-distributed-optimizer --overlap-grad-reduce \
    --overlap-param-gather --recompute-granularity selective --recompute-modules core_attn \
    --train-data-path data/train_text_document --valid-data-path data/valid_text_document \
    --vocab-file data/gpt2-vocab.json --merge-file data/gpt2-merges.txt --tokenizer-type GPT2BPETokenizer \
    --data-cache-path cache --log-interval 100 --log-throughput --logging-level 20 \
    --save-interval 10000 --eval-interval 1000 --eval-iters 10 --full-validation \
    --save checkpoints --load checkpoints --ckpt-format torch_dist --async-save \
    --tensorboard-dir runs --exit-signal-handler --distributed-timeout-minutes 60
