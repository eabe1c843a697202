python3 -m torch.distributed.launch --nproc_per_node=4 train.py \
    --model_config config/model_config.json --tokenized_data_path data/tokenized/ \
    --tokenizer_path cache/vocab_user.txt --raw_data_path data/train.json --epochs 800 \
    --log_step 200 --stride 512 --output_dir model/ --device 0,1,2,3 --num_pieces 100 --raw \
    --batch_size 4 --fp16 --fp16_opt_level O2
