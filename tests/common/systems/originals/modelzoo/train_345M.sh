# The 39 flags of the ModelZoo's train_full_8p.sh for --model_size=345M, with their values.
python3 run.py --include localhost:0,1,2,3,4,5,6,7 pretrain_gpt.py \
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 2 \
    --num-layers 24 --hidden-size 1024 --num-attention-heads 16 \
    --seq-length 1024 --max-position-embeddings 1024 \
    --micro-batch-size 4 --global-batch-size 16 \
    --lr 1.5e-4 --min-lr 1.5e-5 --lr-decay-style cosine --lr-decay-iters 320000 --lr-warmup-fraction .01 \
    --train-iters 500000 --weight-decay 1e-2 --clip-grad 1.0 \
    --attention-dropout 0.0 --hidden-dropout 0.0 --fp16 --seed 1234 \
    --data-path ./data/my-gpt_text_sentence --vocab-file ./data/gpt2-vocab.json --merge-file ./data/gpt2-merges.txt \
    --data-impl mmap --split 949,50,1 --num-workers 16 --distributed-backend nccl \
    --log-interval 100 --save-interval 100000 --eval-interval 1000 --eval-iters 10 \
    --save ./ckpts/ckpts_tmp --load ./ckpts/ckpts_tmp --tensorboard-dir ./ckpts/ckpts_tmp/tensorboard_dir \
    --checkpoint-activations --deepspeed-activation-checkpointing \
    --deepspeed --deepspeed_config ./ds_config.json &> ./test/output/0/train_0.log &
